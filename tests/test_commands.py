"""The commands as Python functions do what the commands do."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import transduce
from tests.support.pairs import sentences, write_pairs
from tests.support.training import SETTINGS
from transduce import ConfigError, TrainedRun, Translator, override, tiny
from transduce.data.prepare import Prepared
from transduce.training.settle import Settled
from transduce.training.share import Share
from transduce.training.trainer import Stopped, Trainer

SMALL = ["model.n_encoder_layers=1", "model.n_decoder_layers=1", "model.d_model=22", "model.d_ff=13", *SETTINGS]
OPTIONS: dict[str, Any] = {"size": "tiny", "settings": SMALL, "device": "cpu", "vocab_size": 300}


def page_in(frame: str) -> str:
    """The page of a frame in a notebook."""
    match = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', frame)
    assert match is not None
    return unescape(match[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("run")
    files = write_pairs(folder, "a", sentences(200))
    return transduce.train(*files, out=folder / "run", quiet=True, **OPTIONS)


def test_a_run_has_a_model_and_a_report(run: TrainedRun) -> None:
    assert run.steps == 12
    assert run.choice.taken in run.choice.candidates
    assert isinstance(run.translator, Translator)
    page = page_in(run._repr_html_())
    assert "Content-Security-Policy" in page
    assert "validation" in page


def test_the_same_call_returns_the_same_run_and_another_one_is_refused(run: TrainedRun) -> None:
    files = [str(run.folder.parent / f"a.{language}") for language in ("de", "en")]
    assert transduce.train(*files, out=run.folder, quiet=True, **OPTIONS) == run
    with pytest.raises(ConfigError, match="holds a run with other arguments"):
        transduce.train(*files, out=run.folder, quiet=True, **(OPTIONS | {"vocab_size": 301}))


def test_progress_is_printed_unless_it_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = write_pairs(tmp_path, "a", sentences(200))
    for is_quiet in (False, True):
        transduce.train(*files, out=tmp_path / f"quiet-{is_quiet}", quiet=is_quiet, **OPTIONS)
        output = capfd.readouterr()
        assert ("validation perplexity" in output.err) != is_quiet
        assert output.out == ""
        assert not is_quiet or output.err == ""


def test_an_interrupted_call_saves_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, take_step = write_pairs(tmp_path, "a", sentences(200)), Trainer.take_step

    def take_step_and_interrupt(trainer: Trainer, step: int, share: Share) -> None:
        take_step(trainer, step, share)
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as changed:
        changed.setattr(Trainer, "take_step", take_step_and_interrupt)
        with pytest.raises(Stopped, match="stopped after step 4, which is saved"):
            transduce.train(*files, out=tmp_path / "run", quiet=True, **OPTIONS)
    assert transduce.train(*files, out=tmp_path / "run", quiet=True, **OPTIONS).steps == 12


def test_a_run_need_not_be_in_the_main_thread(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "a", sentences(200))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(transduce.train, *files, out=tmp_path / "run", quiet=True, **OPTIONS).result()
    assert run.steps == 12


def test_a_configuration_replaces_what_follows_from_the_text(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "a", sentences(200))
    config = override(tiny(), [*SMALL, "train.schedule=linear"])
    run = transduce.train(*files, out=tmp_path / "run", config=config, device="cpu", vocab_size=300, quiet=True)
    settled = Settled.from_json((run.folder / "run.json").read_text()).config
    assert (settled.train, settled.data, settled.decode) == (config.train, config.data, config.decode)
    assert (settled.model.d_model, settled.model.target_vocab_size) == (22, 300)


def test_text_that_is_mixed_in_is_not_held_out(tmp_path: Path) -> None:
    new = write_pairs(tmp_path, "new", sentences(200, seed=1))
    old = write_pairs(tmp_path, "old", sentences(800, seed=2))
    run = transduce.train(*new, out=tmp_path / "run", mix=old, quiet=True, **OPTIONS)
    report = Prepared(run.folder / "prepared").report
    assert [corpus.n_held_out > 0 for corpus in report.corpora] == [True, False]
    assert all(corpus.n_kept > 50 for corpus in report.corpora)


def test_a_model_is_scored_and_inspected(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_text("Das ist gut.\nIch bin müde.\n")
    (tmp_path / "a.en").write_text("That's good.\nI'm tired.\n")
    scores = transduce.evaluate("tatoeba-de-en", tmp_path / "a.de", tmp_path / "a.en", device="cpu", quiet=True)
    assert (scores.n_sentences, scores.exact_match) == (2, 1.0)
    inspection = transduce.inspect(Translator.load(device="cpu"), "Das ist gut.", "Ich bin müde.")
    assert [record.translation for record in inspection.records] == ["That's good.", "I'm tired."]
    assert page_in(inspection._repr_html_()) == inspection.to_html()
    with pytest.raises(ConfigError, match="there is no sentence to inspect"):
        transduce.inspect("tatoeba-de-en")
