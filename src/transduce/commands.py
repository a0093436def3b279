"""The commands as Python functions, for scripts and notebooks. They do the same as the command line.

Progress is printed as lines on stderr. Ctrl-C saves a training run, and the same call resumes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transduce.config import RunConfig, override
from transduce.data import corpora
from transduce.data.prepare import Prepared
from transduce.data.prepare import prepare as prepare_corpora
from transduce.errors import ConfigError

if TYPE_CHECKING:
    from transduce.evaluation.evaluate import Evaluation
    from transduce.insight.attention import AttentionRecord
    from transduce.training.journal import FinalChoice
    from transduce.translation.translator import Translator

FilePath = str | Path
FRAME_HEIGHT = 900
"""In pixels, of a page in a notebook."""


def prepare(
    *text: FilePath,
    out: FilePath,
    valid: tuple[FilePath, FilePath] | None = None,
    languages: str | None = None,
    vocab_size: int | None = None,
    keep_all: bool = False,
    settings: Iterable[str] = (),
    quiet: bool = False,
) -> Prepared:
    """Prepare training data, like `transduce prepare`. `text`: two files, one table, or the name of a corpus.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import transduce
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.de").write_text("".join(f"Haus {n} ist neu.\\n" for n in range(100)))
    >>> _ = (folder / "a.en").write_text("".join(f"House {n} is new.\\n" for n in range(100)))
    >>> prepared = transduce.prepare(folder / "a.de", folder / "a.en", out=folder / "prepared", quiet=True)
    >>> prepared.report.corpora[0].n_read
    100
    """
    from transduce.cli.show.progress import progress_on_stderr

    train, valid_corpora = corpora.choose(**_data(text, valid, languages))
    config = override(RunConfig(), settings)
    with progress_on_stderr(quiet) as progress:
        prepare_corpora(
            train,
            Path(out),
            config.data,
            valid=valid_corpora,
            vocab_size=vocab_size,
            with_cleaning=not keep_all,
            progress=progress,
        )
    return Prepared(out)


def train(
    *text: FilePath,
    out: FilePath,
    valid: tuple[FilePath, FilePath] | None = None,
    languages: str | None = None,
    vocab_size: int | None = None,
    size: str | None = None,
    budget: str | None = None,
    epochs: float | None = None,
    from_model: FilePath | None = None,
    mix: Sequence[FilePath] = (),
    config: RunConfig | None = None,
    settings: Iterable[str] = (),
    device: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> TrainedRun:
    """Train a translator, like `transduce train`. The same call resumes a run that was interrupted.

    `text`: two files, one table, the name of a corpus, or a prepared folder. `config`: all settings, instead of those
    that follow from the text and the machine. `settings`: single ones, such as "train.max_steps=1000".

    >>> import tempfile
    >>> import transduce
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> settings = ["train.max_steps=2", "train.valid_translations=1"]
    >>> run = transduce.train("tatoeba-40k", out=folder, size="tiny", settings=settings, device="cpu", quiet=True)
    >>> run.steps, len(run.translator.translate(["Das ist gut."]))
    (2, 1)
    """
    from transduce.cli.show.training import show_training
    from transduce.insight.report import with_report
    from transduce.training.request import Request, settings_of_config
    from transduce.training.run import train as train_run

    if not text:
        raise ConfigError("nothing to train on: give two files, or the name of a corpus")
    is_prepared = len(text) == 1 and Path(text[0]).is_dir()
    data = _data(text, valid, languages) | ({"mix": [str(path) for path in mix]} if mix else {})
    request = Request(
        data={} if is_prepared else data,
        prepared=str(text[0]) if is_prepared else None,
        vocab_size=vocab_size,
        size=size,
        budget=budget,
        epochs=epochs,
        from_model=None if from_model is None else str(from_model),
        settings=[*(settings_of_config(config) if config is not None else []), *settings],
        device=device,
        threads=threads,
    )
    with show_training(Path(out), quiet, tensorboard=False) as (on_event, progress):
        train_run(Path(out), request, with_report(Path(out), on_event), progress)
    return TrainedRun(Path(out))


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. A notebook shows its report.

    >>> import tempfile
    >>> import transduce
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> settings = ["train.max_steps=2", "train.valid_translations=1"]
    >>> run = transduce.train("tatoeba-40k", out=folder, size="tiny", settings=settings, device="cpu", quiet=True)
    >>> run.choice.taken in run.choice.candidates
    True
    """

    folder: Path

    @property
    def choice(self) -> FinalChoice:
        """The candidates for the final model, and which one it is."""
        from transduce.training.journal import FinalChoice

        return FinalChoice.from_json(self._result)

    @property
    def steps(self) -> int:
        return int(self._result["steps"])

    @property
    def _result(self) -> dict[str, Any]:
        from transduce.training.request import read_json
        from transduce.training.run import RESULT

        return read_json(self.folder / RESULT)

    @property
    def translator(self) -> Translator:
        """The final model, loaded anew each time."""
        from transduce.translation.translator import Translator

        return Translator.load(self.folder)

    def _repr_html_(self) -> str:
        from transduce.insight.report import report_of

        return _frame(report_of([self.folder]))


def evaluate(
    model: FilePath,
    source: FilePath,
    reference: FilePath,
    *,
    to: str | None = None,
    device: str | None = None,
    n_bootstrap: int = 1000,
    quiet: bool = False,
) -> Evaluation:
    """Score a model, like `transduce evaluate`. `model`: a model folder or a run, or the file of a translation.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import transduce
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "test.de").write_text("Das ist gut.\\n")
    >>> _ = (folder / "test.en").write_text("That's good.\\n")
    >>> scores = transduce.evaluate("tatoeba-de-en", folder / "test.de", folder / "test.en", device="cpu", quiet=True)
    >>> scores.exact_match
    1.0
    """
    from transduce.cli.show.progress import progress_on_stderr
    from transduce.evaluation.evaluate import evaluate_files
    from transduce.model_folder.format import find_model
    from transduce.translation.translator import Translator

    with progress_on_stderr(quiet) as progress:
        evaluation, _ = evaluate_files(
            find_model(Path(model)),
            Path(source),
            Path(reference),
            lambda path: Translator.load(path, device=device),
            to=to,
            n_bootstrap=n_bootstrap,
            progress=progress,
        )
    return evaluation


def inspect(
    model: Translator | FilePath, *sentences: str, to: str | None = None, device: str | None = None
) -> Inspection:
    """Record what every head attends to while the model translates, like `transduce inspect`.

    >>> import transduce
    >>> inspection = transduce.inspect("tatoeba-de-en", "Das ist gut.", device="cpu")
    >>> inspection.records[0].translation
    "That's good."
    """
    from transduce.insight.attention import inspect as inspect_records
    from transduce.translation.translator import Translator

    if not sentences:
        raise ConfigError("there is no sentence to inspect: give one after the model")
    translator = model if isinstance(model, Translator) else Translator.load(model, device=device)
    return Inspection(tuple(inspect_records(translator, list(sentences), to)))


@dataclass(frozen=True)
class Inspection:
    """Records of attention. A notebook shows them as the inspector's page.

    >>> import transduce
    >>> inspection = transduce.inspect("tatoeba-de-en", "Das ist gut.", device="cpu")
    >>> inspection.records[0].weights["memory"].shape  # layers, heads, target tokens, source tokens
    (3, 4, 6, 5)
    """

    records: tuple[AttentionRecord, ...]

    def to_html(self) -> str:
        """The inspector's page, as one file."""
        from transduce.insight.page import to_page

        return to_page(self.records)

    def _repr_html_(self) -> str:
        return _frame(self.to_html())


def _data(text: Sequence[FilePath], valid: tuple[FilePath, FilePath] | None, languages: str | None) -> dict[str, Any]:
    """The arguments of `corpora.choose`."""
    return {
        "files": [str(path) for path in text],
        "pairs": [],
        "valid": None if valid is None else tuple(map(str, valid)),
        "valid_pairs": [],
        "languages": languages,
        "columns": "1,2",
        "fields": None,
        "both_ways": False,
        "data_root": None,
    }


def _frame(page: str) -> str:
    """The page in a frame, which keeps its styles and its content-security policy apart from those of the notebook."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
