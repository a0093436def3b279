"""Translation of text: one result for each line, the same in any batch, with a flag for each known problem."""

from __future__ import annotations

import io
import json
import math
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transduce import ConfigError, DataError, ModelFolderError, Transformer, load_model, save_model
from transduce.data.prepare import Prepared
from transduce.data.subword import SUBWORDS, Subwords
from transduce.evaluation.evaluate import perplexity_of
from transduce.model_folder.format import Origin, load_origin
from transduce.search.hypotheses import Hypothesis
from transduce.search.spelling import LINE_BREAKS
from transduce.translation.lines import LineStream
from transduce.translation.records import Form, translate_files
from transduce.translation.result import Translation
from transduce.translation.threads import SharedLines
from transduce.translation.translator import CLOSE, CLOSE_SHARE, Translator


@pytest.fixture(scope="session")
def translator(trained: Path) -> Translator:
    return Translator.load(trained, device="cpu")


def with_settings(translator: Translator, batch_size: int = 64, **changes: Any) -> Translator:
    return Translator(
        translator.model,
        translator.config,
        translator.subwords,
        translator.origin,
        translator.heads,
        settings=replace(translator.settings, **changes),
        batch_size=batch_size,
    )


@pytest.fixture(scope="session")
def sentences(trained: Path) -> list[str]:
    """500 sentences of the validation data. Every seventh is joined with the next one, so that lengths differ more."""
    prepared = Prepared(trained / "prepared")
    rows = range(0, len(prepared.valid), max(1, len(prepared.valid) // 500))
    texts = prepared.subwords.decode([prepared.valid.pair(row)[0].tolist() for row in rows])[:500]
    return [
        f"{text} {next_text}" if i % 7 == 0 else text
        for i, (text, next_text) in enumerate(zip(texts, texts[1:] + texts[:1], strict=True))
    ]


@pytest.fixture(scope="session")
def expected(translator: Translator, sentences: list[str]) -> list[Translation]:
    """The translations of `sentences` in batches of 64."""
    return with_settings(translator, batch_size=64).translate(sentences)


@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 7, 64]
)
def test_translations_do_not_depend_on_batch_size_and_order(
    translator: Translator, sentences: list[str], expected: list[Translation], batch_size: int
) -> None:
    assert len(sentences) == 500
    assert len({translation.text for translation in expected}) > 50, "the model must give different translations"
    shuffled = random.Random(batch_size).sample(range(500), 500)
    results = with_settings(translator, batch_size=batch_size).translate([sentences[i] for i in shuffled])
    differences = []
    for place, translation in zip(shuffled, results, strict=True):
        # Only translations with the flag "close" may differ.
        assert translation.text == expected[place].text or "close" in translation.flags, sentences[place]
        if translation.text == expected[place].text:
            allowed = (CLOSE - CLOSE_SHARE * translation.log_prob) / 2
            differences.append(abs(translation.log_prob - expected[place].log_prob) / allowed)
    assert len(differences) >= 495
    assert max(differences) < 1, "larger differences could change translations that are not flagged"
    assert sum("close" in translation.flags for translation in expected) < 100, "the flag must be rare"


def test_scores_equal_those_computed_from_token_probabilities(translator: Translator, sentences: list[str]) -> None:
    for translation in with_settings(translator, beam_size=3).translate(sentences[:20], with_details=True):
        assert translation.tokens is not None
        log_prob = sum(math.log(token.probability) for token in translation.tokens)
        assert translation.log_prob == pytest.approx(log_prob, abs=1e-3)
        if "split" not in translation.flags:
            assert translation.score == pytest.approx(log_prob / ((5 + len(translation.tokens)) / 6) ** 0.6, abs=1e-3)
        for token in translation.tokens:
            assert all(piece != token.piece for piece, _ in token.runners_up)


any_text = st.text(alphabet=st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(any_text, st.sampled_from(["", " ", "\t", "Das ist gut.", "a" * 300])), max_size=9))
def test_each_line_gets_one_line_of_translation_for_any_text(translator: Translator, lines: list[str]) -> None:
    quick = with_settings(translator, beam_size=1, max_extra_tokens=3)
    translations = quick.translate(lines)
    assert len(translations) == len(lines)
    for line, translation in zip(lines, translations, strict=True):
        assert "\n" not in translation.text
        core = translation.text.strip()
        assert not set(core) & set(LINE_BREAKS)
        if not line.strip():
            assert translation.text == ""
        elif not core:
            assert "empty" in translation.flags


def test_a_line_that_is_too_long_is_split_and_flagged(trained: Path, translator: Translator) -> None:
    (short, long) = translator.translate(["Das ist gut.", "Das ist gut. " * 60])
    assert "split" not in short.flags
    assert "split" in long.flags
    limit = translator.longest_source
    assert limit is not None
    tokens = translator.subwords.encode(["Das ist gut. " * 60])[0]
    line = translator.prepare("Das ist gut. " * 60, [], [])
    assert len(line.ids) >= len(tokens) / limit
    assert all(len(ids) <= limit for ids in line.ids)
    assert [segment.text[-4:] for segment in line.segments] == ["gut."] * len(line.segments), (
        "it is split between sentences"
    )
    assert load_origin(trained / "model")[0].longest_source == limit + 1


def test_each_problem_is_flagged(translator: Translator) -> None:
    cut = with_settings(translator, max_extra_tokens=0, min_length=50, beam_size=1)
    assert "limit" in cut.translate(["Das ist gut."])[0].flags
    (looping,) = translator.translate(["Das ist gut."], prefix="na na na na na na na na na na na na na na")
    assert "loop" in looping.flags
    (repeated,) = translator.translate(
        ["na na na na na na na na na na na na na na"], prefix="na na na na na na na na na"
    )
    assert "loop" not in repeated.flags, "the source repeats itself too"
    assert translator.translate([""])[0].flags == ()
    hypothesis = Hypothesis([], -1.0, -1.0, True, margin=1e-6)
    line = replace(translator.prepare("Das ist gut.", [], []), results={0: [hypothesis]})
    assert translator._finish(line, None).flags == ("empty", "close")


def test_white_space_around_a_line_is_kept(translator: Translator) -> None:
    plain, indented = translator.translate(["Das ist gut.", "\t  Das ist gut. "])
    assert indented.text == f"\t  {plain.text} "


def test_alternatives_are_ranked_and_a_prefix_is_kept(translator: Translator) -> None:
    (translation,) = with_settings(translator, n_best=4).translate(["Ich habe ein Haus."])
    assert len({alternative.text for alternative in translation.alternatives}) > 1
    scores = [alternative.score for alternative in translation.alternatives]
    assert scores == sorted(scores, reverse=True)
    assert translation.alternatives[0].text == translation.text
    for prefix in ("We can", "We can ", "We can say what we want, and then say it once more, " * 12):
        (forced,) = translator.translate(["Ja."], prefix=prefix)
        assert forced.text.startswith(prefix.strip())
    (forced, *_) = translator.translate(["Das ist gut. " * 60], prefix="We can")
    assert "split" in forced.flags
    assert forced.text.startswith("We can")
    for prefix in ("Well\nthen", "Well\tthen", "Well\u2028"):
        with pytest.raises(ConfigError, match="must be one line without tabs: remove them"):
            translator.translate(["Ja."], prefix=prefix)
    (split,) = with_settings(translator, n_best=3).translate(["Das ist gut. " * 60])
    assert len(split.alternatives) == 3, "a split line has as many alternatives"


def test_samples_are_reproducible_with_the_same_seed(translator: Translator) -> None:
    lines = ["Ich habe ein Haus."] * 5
    sampler = with_settings(translator, method="sample", seed=3)
    first = [translation.text for translation in sampler.translate(lines)]
    assert first == [t.text for t in with_settings(translator, batch_size=2, method="sample", seed=3).translate(lines)]
    assert len(set(first)) > 1, "each line has its own random numbers"
    assert first != [t.text for t in with_settings(translator, method="sample", seed=4).translate(lines)]


# Streams


def test_each_line_is_translated_before_the_next_one_arrives(translator: Translator) -> None:
    """As in a dialogue: each line is sent after the translation of the line before it. Some lines are blank."""
    inputs: queue.Queue[str | None] = queue.Queue()
    outputs: queue.Queue[Translation] = queue.Queue()

    def lines() -> Iterator[str]:
        while (line := inputs.get()) is not None:
            yield line

    def work() -> None:
        for translation in translator.stream(lines()):
            outputs.put(translation)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    for line in ("Das ist gut.", "", "", "Ich bin hier."):
        inputs.put(line)
        assert (outputs.get(timeout=20).text == "") == (line == "")
    inputs.put(None)
    worker.join(timeout=20)
    assert not worker.is_alive()


def test_searches_that_share_lines_do_not_wait_for_more_lines(translator: Translator) -> None:
    """A search that waited would delay the other searches, which have sentences in progress."""
    second_requested, second_allowed = threading.Event(), threading.Event()

    def texts() -> Iterator[str]:
        yield "Das ist gut."
        second_requested.set()
        second_allowed.wait(timeout=20)
        yield "Ich bin hier."

    lines = LineStream(texts(), lambda text: translator.prepare(text, [], []), 64, translator.config.model.eos_id)
    try:
        assert lines.get(wait=True) is not None
        assert second_requested.wait(timeout=20)
        shared, results = SharedLines(lines), queue.SimpleQueue[object]()
        threading.Thread(target=lambda: results.put(shared.get(wait=True)), daemon=True).start()
        assert results.get(timeout=5) is None, "no sentence is available"
        second_allowed.set()
        assert shared.get(wait=True) is None, "after the first None, all searches end and start again together"
    finally:
        second_allowed.set()
        lines.close()


def test_a_stream_reads_only_a_bounded_number_of_lines_ahead(translator: Translator) -> None:
    n_read = 0

    def lines() -> Iterator[str]:
        nonlocal n_read
        for _ in range(100_000):
            n_read += 1
            yield "Gut."

    stream = with_settings(translator, batch_size=2, beam_size=1).stream(lines())
    for _ in range(100):
        next(stream)
    assert n_read < 250
    stream.close()  # type: ignore[attr-defined]  # the stream is a generator


STREAM = """
import resource, sys
from transduce import Translator
from transduce.translation.records import Form, translate_files
from dataclasses import replace
translator = Translator.load(sys.argv[1], device="cpu", batch_size=256)
translator.settings = replace(translator.settings, beam_size=1, max_extra_tokens=0)
n_written = 0
def write(line):
    global n_written
    n_written += 1
    if n_written in (10_000, 100_000):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
translate_files(translator, [sys.argv[2]], Form(), write, to="en")
print(n_written)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(tmp_path: Path) -> None:
    """Compares the memory in use after ten thousand lines with that after a hundred thousand."""
    (tmp_path / "in").write_text("a\n" * 100_000)
    folder = Path(__file__).parents[1] / "models" / "version-1"
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(folder), str(tmp_path / "in")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    early, late, n = map(int, done.stdout.split())
    assert n == 100_000
    assert late - early < 20_000, f"memory grew by {late - early} KiB"


def test_an_error_of_the_input_is_raised_after_the_lines_before_it(translator: Translator) -> None:
    def lines() -> Iterator[str]:
        yield "Gut."
        raise DataError("the disk has failed: replace it")

    stream = translator.stream(lines())
    assert next(stream).text, "the line before the error is translated"
    with pytest.raises(DataError, match="the disk has failed"):
        next(stream)


# Models


def test_a_model_with_several_target_languages_requires_a_choice(translator: Translator, tmp_path: Path) -> None:
    subwords = Subwords.train(["ein Haus am See", "un maison", "a house"] * 9, 300, ["en", "fr"])
    origin = Origin(directions=(("de", "en"), ("de", "fr")), tagged_languages=("en", "fr"), longest_source=20)
    config = replace(
        translator.config, model=replace(translator.config.model, source_vocab_size=300, target_vocab_size=300)
    )
    torch.manual_seed(1)
    save_model(tmp_path / "model", Transformer(config.model), config, subwords, origin)
    multilingual = Translator.load(tmp_path / "model", device="cpu")
    assert multilingual.tag_for("fr") == [subwords.tag("fr")]
    assert multilingual.longest_source == 18
    with pytest.raises(ConfigError, match="this model translates into en, fr: choose one with to='en'"):
        multilingual.translate(["ein Haus"])
    with pytest.raises(ConfigError, match=r"^to is 'it', this model translates into en, fr: choose one of them"):
        multilingual.translate(["ein Haus"], "it")
    assert multilingual.translate(["ein Haus"], "en")[0].text != multilingual.translate(["ein Haus"], "fr")[0].text
    assert translator.tag_for("en") == []
    with pytest.raises(ConfigError, match=r"^to is 'fr', this model translates into en: leave it out"):
        translator.tag_for("fr")


def test_learned_positions_limit_the_length_of_text_and_prefix(translator: Translator) -> None:
    model_config = replace(translator.config.model, positions="learned", max_positions=16)
    torch.manual_seed(2)
    config = replace(translator.config, model=model_config)
    learned = Translator(Transformer(model_config).eval(), config, translator.subwords)
    long = "Das ist ein Haus, und das ist noch ein Haus, und noch eins, und noch eins. " * 3
    (translation,) = learned.translate([long], with_details=True)
    assert {"split", "limit"} <= set(translation.flags)
    with pytest.raises(ConfigError, match="tokens, this model's limit is 15: shorten it"):
        learned.translate(["Das ist gut."], prefix=long)


def test_an_invalid_model_folder_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="cannot be read"):
        Translator.load(tmp_path)
    model, config = load_model(trained / "model")
    save_model(tmp_path / "bare", model, config)
    with pytest.raises(ModelFolderError, match=r"subwords\.model cannot be read"):
        Translator.load(tmp_path / "bare", device="cpu")
    save_model(tmp_path / "other", model, config, Subwords.train(["abc de fgh ijkl mnop"] * 9, 290))
    Translator.load(tmp_path / "other", device="cpu")
    (tmp_path / "other" / SUBWORDS).write_bytes(b"nonsense")
    with pytest.raises(ModelFolderError, match="subword model cannot be read"):
        Translator.load(tmp_path / "other", device="cpu")
    with pytest.raises(ConfigError, match="batch size is 0"):
        Translator.load(trained, device="cpu", batch_size=0)


def test_training_stores_the_heads_that_give_the_alignment(translator: Translator) -> None:
    """experiments/alignment_error.py measures how good the alignment is, with models that are trained for longer."""
    assert translator.heads is not None
    config = translator.config.model
    assert translator.heads.layer < config.n_decoder_layers
    (translation,) = translator.translate(["Das ist gut."], with_details=True)
    assert translation.alignment is not None
    assert all(0 <= s < 3 and 0 <= t < len(translation.text.split()) for s, t in translation.alignment)
    for line in ("x" * 300 + " Haus", "Das ist gut. " * 60, "これは家です。" * 40):
        (translation,) = translator.translate([line], with_details=True)
        assert "split" in translation.flags
        assert translation.alignment
        n_source, n_target = len(line.split()), len(translation.text.split())
        assert all(s < n_source and t < n_target for s, t in translation.alignment), line


# Files


def run_files(translator: Translator, tmp_path: Path, data: bytes, **options: Any) -> list[str]:
    (tmp_path / "in").write_bytes(data)
    out = io.StringIO()
    translate_files(translator, [str(tmp_path / "in")], Form(**options), out.write)
    assert out.getvalue().endswith("\n") or not data
    return out.getvalue().split("\n")[:-1]


def test_files_of_text_tables_and_json_are_translated(translator: Translator, tmp_path: Path) -> None:
    translator = with_settings(translator, beam_size=1)
    good, here = (translation.text for translation in translator.translate(["Das ist gut.", "Ich bin hier."]))
    assert run_files(translator, tmp_path, b"Das ist gut.\r\n\nIch bin hier.") == [good, "", here]
    table = run_files(translator, tmp_path, b"1\tDas ist gut.\tx\n\n2\tIch bin hier.", column=2)
    assert table == [f"1\tDas ist gut.\tx\t{good}", "", f"2\tIch bin hier.\t{here}"]
    record = json.dumps({"id": 7, "text": {"de": "Das ist gut."}})
    (written,) = run_files(translator, tmp_path, record.encode(), key="text.de")
    assert json.loads(written) == {"id": 7, "text": {"de": "Das ist gut."}, "translation": good}
    (nested,) = run_files(
        translator, tmp_path, b'{"translation": {"de": "Das ist gut."}}', key="translation.de", into="en"
    )
    assert json.loads(nested) == {"translation": {"de": "Das ist gut."}, "en": good}
    (surrogate,) = run_files(translator, tmp_path, b'{"a": "Gut \\ud800."}', key="a")
    assert json.loads(surrogate)["translation"]
    assert run_files(translator, tmp_path, b"\t\t\n", column=2) == ["\t\t"]
    (scored,) = run_files(translator, tmp_path, b"Das ist gut.\n", with_scores=True)
    assert scored.split("\t")[0] == good
    assert float(scored.split("\t")[1]) < 0
    for data, options, message in [
        (b"a\tb\nc", {"column": 2}, "line 2: has 1 columns, must have 2: correct the line"),
        (b"{", {"key": "a"}, "line 1: is not a JSON object"),
        (b'{"b": 1}', {"key": "a"}, "line 1: has no field 'a'"),
        (b'{"a": 1}', {"key": "a"}, "line 1: field 'a' is 1, must be text"),
        (b'{"a": "b", "translation": 1}', {"key": "a"}, "line 1: already has a field 'translation': name another"),
        (b"[1]", {"key": "a"}, "line 1: is not a JSON object"),
    ]:
        with pytest.raises(DataError, match=message):
            run_files(translator, tmp_path, data, **options)  # type: ignore[arg-type]


def transduce(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "transduce", *arguments], input=stdin, capture_output=True)


def test_the_command_writes_the_requested_outputs(trained: Path, tmp_path: Path, translator: Translator) -> None:
    stdin = b"Das ist gut.\n\nIch habe ein Haus.\n" + b"Gut \xff.\n"
    align = tmp_path / "align"
    done = transduce(
        "translate", str(trained), "--beam", "2", "--alignments", str(align), "--device", "cpu", stdin=stdin
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().split("\n")
    assert (len(lines), lines[1], lines[4]) == (5, "", "")
    expected = with_settings(translator, beam_size=2).translate(["Das ist gut."])[0].text
    assert lines[0] == expected
    messages = done.stderr.decode()
    assert "1 lines were not valid UTF-8, the first is standard input, line 4: invalid bytes were replaced" in messages
    assert "4 lines in" in messages
    links = align.read_text().split("\n")
    assert (len(links), links[1]) == (5, "")
    assert all(len(link.split("-")) == 2 for link in links[0].split())

    n_best = transduce("translate", str(trained), "-", "--nbest", "6", "-q", stdin=b"Das ist gut.\n\n")
    assert n_best.stderr == b""
    rows = [line.split(" ||| ") for line in n_best.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == ["0"] * 6 + ["1"]
    assert {len(row) for row in rows} == {4}
    assert float(rows[0][3]) >= float(rows[1][3])

    (line,) = transduce("translate", str(trained), "--json", stdin=b"Das ist gut.").stdout.decode().splitlines()
    record = json.loads(line)
    assert record.keys() == {"source", "text", "score", "log_prob", "flags", "alternatives", "tokens", "alignment"}
    assert record["tokens"][0].keys() == {"piece", "probability", "runners_up"}


def test_a_closed_output_ends_the_command_without_a_message(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("Gut.\n" * 1000)
    command = [sys.executable, "-m", "transduce", "translate", str(trained), str(tmp_path / "in"), "--beam", "1", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_the_command_ends_even_while_its_input_is_open(trained: Path) -> None:
    """Ctrl-C, a closed output and an invalid line end the command, each while it waits for more input."""
    command = [sys.executable, "-m", "transduce", "translate", str(trained), "--beam", "1", "-q"]

    def start(*options: str) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*command, *options], bufsize=0, **pipes)  # type: ignore[call-overload, no-any-return]

    def translate_line(process: subprocess.Popen[bytes], line: bytes) -> bytes:
        assert process.stdin
        assert process.stdout
        process.stdin.write(line)
        return process.stdout.readline()

    with start() as interrupted, start() as closed, start("--field", "a") as invalid:
        assert interrupted.stderr
        assert closed.stdout
        assert closed.stderr
        assert closed.stdin
        assert invalid.stdin
        assert invalid.stderr
        translate_line(interrupted, b"Gut.\n")
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(timeout=60) == 130
        assert interrupted.stderr.read() == b"transduce: interrupted\n"
        translate_line(closed, b"Gut.\n")
        closed.stdout.close()
        closed.stdin.write(b"Gut.\n")
        assert closed.wait(timeout=60) == 141
        assert closed.stderr.read() == b""
        assert json.loads(translate_line(invalid, b'{"a": "Gut."}\n'))["translation"]
        invalid.stdin.write(b"{}\n")
        assert invalid.wait(timeout=60) == 2
        assert (
            invalid.stderr.read()
            == b"transduce: standard input, line 2: has no field 'a': correct the line, or name another with --field\n"
        )


def test_a_full_disk_is_reported_with_the_name_of_the_output(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transduce", "translate", str(trained), "-q"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "--alignments", str(tmp_path / "a")], input=b"Gut.\n", stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr == b"transduce: standard output cannot be written (No space left on device): free some space\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither a model folder nor a file: correct its name, or end it with a full stop"),
        (["modle/"], "modle/ is neither a model folder nor a file: correct its name"),
        (["nowhere.txt"], "nowhere.txt is neither a model folder nor a file: correct its name"),
        (["RUN", "nowhere.txt"], "nowhere.txt is not a file: correct its name"),
        (["RUN", ""], "argument 2 is empty: remove it, or write a sentence"),
        (["RUN", "--to", "fr"], "--to is 'fr', this model translates into en: leave it out"),
        (["RUN", "--column", "1", "--field", "x"], "--column and --field exclude each other: keep one"),
        (["RUN", "--dtype", "int3"], "--dtype is 'int3', must be float32, bfloat16 or int8"),
        (
            ["RUN", "--set", "train.seed=3"],
            "--set train.seed=3 does not apply to a trained model: only decode.* settings do",
        ),
        (["RUN", "--sample", "--top-p", "7"], "--top-p is 7.0, must be at most 1"),
        (["RUN", "--sample", "--set", "decode.top_p=7"], "decode.top_p is 7.0, must be at most 1"),
        (["RUN", "--top-p", "0.5"], "--top-p has an effect only when sampling: add --sample"),
        (["RUN", "--beam", "2", "--sample"], "--beam and --sample exclude each other: keep one"),
        (["RUN", "--beam", "2", "--nbest", "4"], "--nbest is 4, must be at most --beam, 2: raise that too"),
        (["RUN", "--nbest", "2", "--column", "1"], "--nbest and --column exclude each other: keep one"),
        (["RUN", "--alignments", "/nowhere/x"], "/nowhere/x cannot be written (No such file or directory)"),
        (["RUN", "."], ". cannot be read (Is a directory): give a file of text"),
        (["RUN", "--device", "tpu"], "--device is 'tpu', must be cpu or cuda"),
    ],
)
def test_bad_input_gives_a_one_line_message_and_exit_code_2(trained: Path, arguments: list[str], message: str) -> None:
    done = transduce("translate", *[str(trained) if a == "RUN" else a for a in arguments], stdin=b"Gut.\n")
    assert done.returncode == 2
    assert done.stdout == b""
    error = done.stderr.decode()
    assert error.startswith(f"transduce: {message}")
    assert len(error.splitlines()) == 1


def test_bfloat16_gives_nearly_the_same_perplexity(trained: Path, translator: Translator, sentences: list[str]) -> None:
    low_precision = Translator.load(trained, device="cpu", dtype=torch.bfloat16)
    lines = sentences[:40]
    texts = [translation.text for translation in translator.translate(lines)]
    # After so little training, many tokens are almost equally probable, so translations may differ. The perplexity of
    # the same texts may not.
    assert len(low_precision.translate(lines)) == len(lines)
    perplexity, expected = (perplexity_of(model, lines, texts, None)[0] for model in (low_precision, translator))
    assert perplexity is not None
    assert perplexity == pytest.approx(expected, rel=0.02)
    assert perplexity != expected, "the precision must differ"
