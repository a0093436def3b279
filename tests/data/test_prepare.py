"""Preparing a folder: all pairs are counted, kept pairs are unchanged, and a folder is complete or absent."""

from __future__ import annotations

import errno
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.support.pairs import sentences, write_pairs
from transduce import DataConfig, DataError, ModelConfig, tiny
from transduce.cli.show.tables import show_report
from transduce.data.cleaning import chunks
from transduce.data.corpora import (
    BUNDLED_NAME,
    DATA_ROOT,
    Corpus,
    corpus_names,
    find_corpus,
    languages_of,
    merge_directions,
    named_corpus,
    registry,
)
from transduce.data.prepare import Prepared, held_out_share, prepare
from transduce.data.store import StoreWriter
from transduce.data.subword import vocab_size_for
from transduce.files import atomic_folder


def text_of(prepared: Prepared, split: str) -> list[tuple[str, str]]:
    store = getattr(prepared, split).store
    pairs = [store[i] for i in range(len(store))]
    return [
        (source, target)
        for source, target in zip(
            prepared.subwords.decode([source.tolist() for source, _ in pairs]),
            prepared.subwords.decode([target.tolist() for _, target in pairs]),
            strict=True,
        )
    ]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transduce", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_prepared_pairs_equal_the_input_pairs(tmp_path: Path) -> None:
    pairs = list(dict.fromkeys(sentences(2000)))
    report = prepare([find_corpus(write_pairs(tmp_path, "a", pairs), None)], tmp_path / "out", DataConfig())
    prepared = Prepared(tmp_path / "out")
    train, valid = text_of(prepared, "train"), text_of(prepared, "valid")
    sources, targets = (set(side) for side in zip(*valid, strict=True))
    assert len(valid) == report.corpora[0].n_held_out == report.valid.n_pairs > 50
    assert sorted(train + valid) == sorted(p for p in pairs if p in valid or not (p[0] in sources or p[1] in targets))
    assert train == [pair for pair in pairs if pair in set(train)], "in their order"
    assert report.to_json() == prepared.report.to_json()
    prepared.train.store.verify()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.json",
        "subwords.model",
        "train.tokens",
        "valid.tokens",
    ]


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    corpus = find_corpus(write_pairs(tmp_path, "a", sentences(25_000)), None)
    for n in (1, 2):
        prepare([corpus], tmp_path / str(n), DataConfig(), n_processes=n)
    for name in ("subwords.model", "train.tokens", "valid.tokens"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_validation_is_stable_and_shares_no_side_with_training(tmp_path: Path) -> None:
    """The pairs are many to many, as in Tatoeba: sources have several targets, and targets several sources."""
    rng = np.random.default_rng(1)
    source, target = ([side[i] for side in sentences(600)] for i in (0, 1))
    pairs = [(source[a], target[b]) for a, b in rng.integers(0, 600, (3000, 2))]
    held: list[set[tuple[str, str]]] = []
    for name, shuffled in (("a", pairs), ("b", pairs[::-1]), ("c", [*pairs, *sentences(150, seed=9)])):
        corpus = find_corpus(write_pairs(tmp_path, name, shuffled), None)
        report = prepare([corpus], tmp_path / f"out-{name}", DataConfig(max_length_ratio=100.0))
        prepared = Prepared(tmp_path / f"out-{name}")
        train, valid = text_of(prepared, "train"), text_of(prepared, "valid")
        assert not {s for s, _ in train} & {s for s, _ in valid}
        assert not {t for _, t in train} & {t for _, t in valid}
        counts = report.corpora[0]
        assert counts.n_shared > 100
        n_dropped = sum(counts.dropped.values())
        assert counts.n_kept + counts.n_shared + counts.n_held_out + n_dropped == counts.n_read == len(shuffled)
        held.append(set(valid))
    assert held[0] == held[1]
    assert held[0] <= held[2]


def test_the_share_held_out_is_a_power_of_two_and_never_large() -> None:
    assert [held_out_share(n, 2000) for n in (0, 1, 1000, 32_000, 64_000, 64_001, 10**7)] == [
        0,
        1 / 16,
        1 / 16,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 8192,
    ]
    assert held_out_share(1000, 0) == 0


def test_validation_files_stay_unchanged_and_their_sentences_leave_training(tmp_path: Path) -> None:
    pairs = list(dict.fromkeys(sentences(500)))
    valid = [pairs[3], ("", "nothing to say"), (pairs[5][0], "other words"), ("andere Worte", pairs[7][1]), pairs[3]]
    corpora = [find_corpus(write_pairs(tmp_path, name, some), None) for name, some in (("a", pairs), ("b", valid))]
    report = prepare(corpora[:1], tmp_path / "out", DataConfig(), valid=corpora[1:])
    prepared = Prepared(tmp_path / "out")
    assert text_of(prepared, "valid") == valid
    assert not {pairs[3], pairs[5], pairs[7]} & set(text_of(prepared, "train"))
    assert report.corpora[0].n_shared >= 3
    assert report.corpora[0].n_held_out == report.held_out_share == 0


def test_several_corpora_and_directions_share_one_store(tmp_path: Path) -> None:
    german, french = sentences(300, 1), sentences(300, 2)
    corpora = merge_directions(
        [
            find_corpus(write_pairs(tmp_path, "a", german), None),
            find_corpus(write_pairs(tmp_path, "a", german)[::-1], None),
            find_corpus(write_pairs(tmp_path, "b", french, "fr-en"), None),
        ]
    )
    assert [(corpus.languages, corpus.both_ways) for corpus in corpora] == [(("de", "en"), True), (("fr", "en"), False)]
    report = prepare(corpora, tmp_path / "out", DataConfig(valid_pairs=0))
    prepared = Prepared(tmp_path / "out")
    assert report.tagged_languages == ["en", "de"]
    n_german, n_french = (corpus.n_kept for corpus in report.corpora)
    assert len(prepared.train) == 2 * n_german + n_french
    rows = np.array([0, n_german, 2 * n_german])
    batch = prepared.train.batch(rows, (60, 60), _model(report.vocab_size))
    expected_tags = [prepared.subwords.tag("en"), prepared.subwords.tag("de"), prepared.subwords.tag("en")]
    assert batch.source_BS[:, 0].tolist() == expected_tags
    text = prepared.subwords.decode(batch.source_BS.tolist())
    assert text == [german[0][0], german[0][1], french[0][0]]
    assert prepared.subwords.decode(batch.target_out_BT.tolist()) == [german[0][1], german[0][0], french[0][1]]
    assert len(prepared.valid) == 0


def _model(vocab_size: int) -> ModelConfig:
    return ModelConfig(source_vocab_size=vocab_size, target_vocab_size=vocab_size)


def test_unusual_line_separators_keep_both_sides_aligned(tmp_path: Path) -> None:
    """Numbered sentences show whether sides match. Between them are lines that other tools split or join."""
    unusual = ["\u2028", "a\u2028b", "x\x0by", "\x0c", "p\x85q", "\x00", "\ufeff", "\r", "tail\r", "x" * 1_000_000]
    n = 200
    source = [f"Nummer {i} ist hier" if i % 5 else unusual[i // 5 % len(unusual)] for i in range(n)]
    target = [f"number {i} is here" if i % 7 else unusual[i // 7 % len(unusual)] for i in range(n)]
    (tmp_path / "a.de").write_bytes("\r\n".join(source).encode() + b"\r\n")
    (tmp_path / "a.en").write_bytes("\n".join(target).encode())
    corpus = find_corpus([str(tmp_path / "a.de"), str(tmp_path / "a.en")], None)
    prepare([corpus], tmp_path / "out", DataConfig(valid_pairs=0))
    kept = text_of(Prepared(tmp_path / "out"), "train")
    numbered = [pair for pair in kept if pair[0].startswith("Nummer") and pair[1].startswith("number")]
    assert numbered == [(source[i], target[i]) for i in range(n) if i % 5 and i % 7]
    assert all(pair in zip(source, (text.removesuffix("\r") for text in target), strict=True) for pair in kept)
    prepare([corpus], tmp_path / "all", DataConfig(valid_pairs=0), with_cleaning=False)
    target = [text.removesuffix("\r") for text in target]  # a line end CR LF
    source = [text.removesuffix("\r") if text == "tail\r" else text for text in source]
    kept = text_of(Prepared(tmp_path / "all"), "train")
    assert len(kept) == n
    assert [pair for i, pair in enumerate(kept) if i % 5 and i % 7] == [
        (source[i], target[i]) for i in range(n) if i % 5 and i % 7
    ]


def test_formats_give_the_same_pairs(tmp_path: Path) -> None:
    pairs = sentences(300)
    files = write_pairs(tmp_path, "a", pairs)
    for path in map(Path, files):
        (tmp_path / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    (tmp_path / "a.tsv").write_text("".join(f"{i}\t{t}\t{s}\n" for i, (s, t) in enumerate(pairs)))
    records = [json.dumps({"id": i, "de": s, "en": t}) for i, (s, t) in enumerate(pairs)]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    arguments_by_format: list[list[object]] = [
        [*files],
        [tmp_path / "a.de.xz", tmp_path / "a.en.xz"],
        [tmp_path / "a.tsv", "--languages", "de-en", "--columns", "3,2"],
        [tmp_path / "a.jsonl", "--languages", "de-en"],
        [tmp_path / "a.jsonl", "--languages", "xx-en", "--fields", "de,en", "--set", "data.valid_pairs=2000"],
        ["--pair", "de-en", *files],
    ]
    texts = []
    for number, arguments in enumerate(arguments_by_format):
        done = run("prepare", *arguments, "--out", tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        texts.append(text_of(Prepared(tmp_path / str(number)), "train"))
    assert all(text == texts[0] for text in texts)
    assert len(texts[0]) > 250


def test_the_vocabulary_size_depends_on_the_corpus(tmp_path: Path) -> None:
    assert [vocab_size_for(n) for n in (100, 9_999, 10_000, 29_000, 300_000, 1_000_000, 4_500_000)] == [
        4000,
        4000,
        8000,
        8000,
        16_000,
        32_000,
        37_000,
    ]
    few = [("Guten Tag", "Good day"), ("Gute Nacht", "Good night")]
    report = prepare([find_corpus(write_pairs(tmp_path, "a", few), None)], tmp_path / "few", DataConfig(valid_pairs=0))
    assert 260 < report.vocab_size < 400
    assert not report.vocab_size_given
    characters = [chr(0x4E00 + i) for i in range(4800)]
    chinese = [("".join(characters[i : i + 40]), f"This is a sentence, number {i} of many") for i in range(0, 4800, 40)]
    many = find_corpus(write_pairs(tmp_path, "b", chinese, "zh-en"), None)
    report = prepare([many], tmp_path / "many", DataConfig(valid_pairs=0))
    assert report.vocab_size > 4800 + 260


def test_the_bundled_corpus_is_complete_and_clean(tmp_path: Path) -> None:
    done = run("prepare", BUNDLED_NAME, "--out", tmp_path / "out", "--stats")
    assert done.returncode == 0, done.stderr
    assert "40,000 pairs read" in done.stdout
    report = Prepared(tmp_path / "out").report
    assert report.corpora[0].dropped == {}
    assert report.corpora[0].n_read == 40_000 == registry()[BUNDLED_NAME]["lines"]["train"]
    assert report.vocab_size == 8000
    backwards = named_corpus(BUNDLED_NAME, "train", ("en", "de"), None)
    assert backwards is not None
    assert next(iter(backwards.read([])))[1].decode() == text_of(Prepared(tmp_path / "out"), "train")[0][0]


def test_the_files_of_named_corpora_are_checked(tmp_path: Path) -> None:
    facts = registry()["multi30k"]
    with pytest.raises(DataError, match=f"multi30k is not in the package: get it from https.*or {DATA_ROOT}"):
        named_corpus("multi30k", "train", None, None)
    with pytest.raises(DataError, match=r"multi30k/train\.de is missing \(also as \.xz or \.gz\): get it from"):
        named_corpus("multi30k", "train", None, tmp_path)
    with pytest.raises(DataError, match="multi30k has de, en, fr, not de-xx"):
        named_corpus("multi30k", "train", ("de", "xx"), tmp_path)
    (tmp_path / "multi30k").mkdir()
    write_pairs(tmp_path / "multi30k", "train", sentences(50))
    write_pairs(tmp_path / "multi30k", "val", sentences(5))
    done = run("prepare", "multi30k", "--out", tmp_path / "out", TRANSDUCE_DATA=str(tmp_path))
    assert done.returncode == 2
    assert "multi30k/train.de is not the file that multi30k names" in done.stderr
    assert facts["sha256"]["multi30k/train.de"][:12] in done.stderr
    assert not (tmp_path / "out").exists()
    for name in corpus_names():
        assert registry()[name]["licence"]
        assert registry()[name]["from"].startswith("https://")


CASES: list[tuple[str, list[str], str]] = [
    ("no files", [], "nothing to prepare: give two files"),
    ("one file", ["a.de"], "a.de is only one side: give a second file"),
    ("three files", ["a.de", "a.en", "b.txt"], "3 files are given, must be source and target: use --pair"),
    ("no such file", ["a.de", "nothing.en"], "nothing.en is not a file: give a file of text"),
    ("no such name", ["multi31k"], "multi31k is not a file: give a file of text, or a name from tatoeba-40k"),
    ("languages unknown", ["a.txt", "b.txt"], "the languages are unclear from the names a.txt and b.txt: add"),
    ("languages of a tsv", ["a.tsv"], "the languages of a.tsv are not known: add --languages, for"),
    ("invalid languages", ["a.de", "a.en", "--languages", "de"], "languages are 'de', must be two codes"),
    ("unequal", ["a.de", "short.en"], "short.en ends after line 7, but a.de is longer"),
    ("damaged", ["a.de", "bad.en.xz"], "bad.en.xz is damaged"),
    ("utf-16", ["a.de", "wide.en"], "wide.en, line 1: the file is UTF-16"),
    ("not text", ["a.de", "latin.en", "--keep-all"], "latin.en, line 2, byte 4: not valid UTF-8: correct it"),
    ("columns", ["a.tsv", "--languages", "de-en", "--columns", "0,1"], "columns are '0,1', must be two numbers"),
    ("few columns", ["a.tsv", "--languages", "de-en", "--columns", "1,9"], "a.tsv, line 1: has 2 columns, must have 9"),
    ("fields", ["a.jsonl", "--languages", "de-en", "--fields", "x"], "fields are 'x', must be two names"),
    ("no field", ["a.jsonl", "--languages", "de-en"], "a.jsonl, line 1: has no field 'de'"),
    ("languages of fields", ["a.jsonl", "--fields", "src,tgt"], "the languages of a.jsonl are not known: add"),
    ("a corpus of trees", ["wsj-sample"], "wsj-sample has no text to train on, only trees: choose from tatoeba-40k"),
    ("empty files", ["empty.de", "empty.en"], "the files are empty"),
    ("nothing left", ["a.de", "a.de2", "--languages", "de-en"], "no pair is left of 20 (source equals target: 20)"),
    ("vocabulary", ["a.de", "a.en", "--vocab-size", "50000"], "vocabulary size is 50000, this text allows at most"),
    ("setting", ["a.de", "a.en", "--set", "train.seed=2"], "--set train.seed=2 has no effect on prepare"),
    ("bound", ["a.de", "a.en", "--set", "data.n_shapes=0"], "data.n_shapes is 0, must be at least 1"),
    ("two tables", ["a.tsv", "b.tsv", "--languages", "de-en"], "a.tsv holds source and target: give it alone"),
    ("compression", ["a.de", "a.en.bz2"], "a.en.bz2 is in an unsupported compression format: decompress it"),
    ("invalid code", ["a.de", "a.en", "--languages", "d>e-en"], "languages are 'd>e-en', must be two codes"),
    ("unused columns", ["a.de", "a.en", "--columns", "2,1"], "--columns is for a .tsv file, and there is none"),
    ("unused fields", ["a.de", "a.en", "--fields", "a,b"], "--fields is for a .jsonl file, and there is none"),
    (
        "unused languages",
        ["--pair", "de-en", "a.de", "a.en", "--languages", "de-en"],
        "--languages is for files without",
    ),
    ("a place that is a file", ["a.de", "a.en", "--out", "a.de/x"], "a.de/x cannot be written (File exists)"),
    ("validated on itself", ["a.de", "a.en", "--valid", "a.de", "a.en"], "all share a side with validation"),
    ("valid direction", ["a.de", "a.en", "--valid", "a.en", "a.de"], "validation is en-de, training de-en: give pairs"),
    ("one of a pair", ["--pair", "de-en"], "Option '--pair' requires 3 arguments"),
    ("not prepared", ["--stats"], "report.json cannot be read (No such file or directory): give a folder of transduce"),
]


@pytest.fixture
def bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pairs = sentences(20)
    write_pairs(tmp_path, "a", pairs)
    (tmp_path / "short.en").write_text("one\n" * 7)
    (tmp_path / "bad.en.xz").write_bytes(lzma.compress(b"one\n" * 20)[:-9])
    (tmp_path / "wide.en").write_bytes("one\n".encode("utf-16") * 20)
    (tmp_path / "latin.en").write_bytes(b"one\n" + "caf\xe9\n".encode("latin-1") * 19)
    (tmp_path / "a.tsv").write_text("ein Haus\ta house\n" * 20)
    (tmp_path / "a.jsonl").write_text('{"src": "ein Haus", "tgt": "a house"}\n' * 20)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    for name in ("b.tsv", "a.en.bz2"):
        (tmp_path / name).write_text("ein Haus\ta house\n")
    for name in ("empty.de", "empty.en"):
        (tmp_path / name).write_text("")
    (tmp_path / "a.de2").write_bytes((tmp_path / "a.de").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_gives_a_one_line_error_and_writes_nothing(
    bad_files: Path, arguments: list[str], message: str
) -> None:
    before = sorted(path.name for path in bad_files.iterdir())
    done = run("prepare", "--out", "out", "--quiet", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert sorted(path.name for path in bad_files.iterdir()) == before


def test_a_full_disk_gives_an_error_and_leaves_no_files(bad_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StoreWriter, "add", full)
    with pytest.raises(DataError, match=r"out cannot be written \(No space left on device\): free some space"):
        prepare([find_corpus(["a.de", "a.en"], None)], "out", DataConfig())
    assert not [path for path in bad_files.iterdir() if "out" in path.name]


def test_a_damaged_store_is_refused(bad_files: Path) -> None:
    prepare([find_corpus(["a.de", "a.en"], None)], "out", DataConfig())
    data = bytearray((bad_files / "out" / "train.tokens").read_bytes())
    data[5] ^= 1
    (bad_files / "out" / "train.tokens").write_bytes(data)
    with pytest.raises(DataError, match=r"train\.tokens is damaged .*: run transduce prepare again"):
        Prepared("out")


def test_only_temporary_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    leftover, other = tmp_path / ".out.abc.unfinished", tmp_path / ".out.fr.abc.unfinished"
    leftover.mkdir()
    other.mkdir()

    def write_the_same_folder_twice() -> None:
        with atomic_folder(tmp_path / "out") as first:
            (first / "x").touch()
            with atomic_folder(tmp_path / "out") as second:
                (second / "y").touch()
                assert first.exists(), "its process is alive"
            assert not leftover.exists()
            assert other.exists(), "it belongs to another folder"

    with pytest.raises(DataError, match="was written by another process meanwhile"):
        write_the_same_folder_twice()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["y"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "out"]


def test_duplicates_are_found_despite_white_space_around_sentences(tmp_path: Path) -> None:
    pairs = sentences(2000)
    corpus = find_corpus(write_pairs(tmp_path, "a", [*pairs, *((s + " ", t) for s, t in pairs)]), None)
    report = prepare([corpus], tmp_path / "out", DataConfig())
    assert report.corpora[0].dropped["duplicate pair"] >= 2000


def test_the_same_text_in_another_language_is_not_a_duplicate(tmp_path: Path) -> None:
    pairs = sentences(200)
    corpora = [find_corpus(write_pairs(tmp_path, "a", pairs, languages), None) for languages in ("de-en", "de-nl")]
    report = prepare(corpora, tmp_path / "out", DataConfig(valid_pairs=0))
    assert report.corpora[0].n_kept == report.corpora[1].n_kept > 190


def test_jsonl_with_nested_fields_and_invalid_utf_8_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"translation": {"de": s, "en": t}}).encode() for s, t in sentences(100)]
    lines.append(b'{"translation": {"de": "caf\xe9", "en": "coffee"}}')
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    fields = "translation.de, translation.en"
    done = run(
        "prepare", tmp_path / "a.jsonl", "--languages", "de-en", "--fields", fields, "--out", tmp_path / "o", "--json"
    )
    assert json.loads(done.stdout)["corpora"][0]["dropped"]["not valid UTF-8"] == 1


def test_blank_lines_of_tsv_and_jsonl_are_pairs_of_empty_texts(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("ein Haus\ta house\n\n")
    (tmp_path / "a.jsonl").write_text('{"de": "ein Haus", "en": "a house"}\n\n')
    for name in ("a.tsv", "a.jsonl"):
        corpus = find_corpus([str(tmp_path / name)], ("de", "en"))
        assert list(corpus.read([])) == [(b"ein Haus", b"a house"), (b"", b"")]


def test_the_command_says_that_there_are_no_validation_pairs(tmp_path: Path) -> None:
    done = run(
        "prepare", *write_pairs(tmp_path, "a", sentences(3)), "--out", tmp_path / "out", "--set", "data.valid_pairs=0"
    )
    assert "validation: none, so training cannot measure its quality" in done.stdout
    symbols = write_pairs(tmp_path, "b", [("\u2585", "\u2585\u2585")])
    done = run("prepare", *symbols, "--out", tmp_path / "symbols", "--keep-all", "--set", "data.valid_pairs=0", "-q")
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr


def test_chunks_of_long_lines_have_fewer_pairs() -> None:
    long = [(b"x" * 100_000, b"y" * 100_000)] * 200
    assert max(len(chunk.pairs) for chunk in chunks(long)) < 60
    assert [chunk.first_line for chunk in chunks(long)][:2] == [1, 1 + len(next(chunks(long)).pairs)]
    assert sum(len(chunk.pairs) for chunk in chunks(long)) == 200


def test_counts_are_readable_on_a_narrow_terminal(tmp_path: Path) -> None:
    pairs = [*sentences(300), ("Berlin ist eine sehr schöne Stadt in Deutschland",) * 2]
    report = prepare([find_corpus(write_pairs(tmp_path, "a", pairs), None)], tmp_path / "out", DataConfig())
    console = Console(width=80, file=io.StringIO(), highlight=False)
    show_report(console, report, tmp_path / "out")
    assert isinstance(console.file, io.StringIO)
    printed = " ".join(console.file.getvalue().split())
    assert "dropped: source equals target 1 0.33%" in printed
    assert f"kept to train on {report.train.n_pairs}" in printed


def test_an_existing_folder_is_not_overwritten(bad_files: Path) -> None:
    (bad_files / "out").mkdir()
    done = run("prepare", "a.de", "a.en", "--out", "out")
    assert (done.returncode, done.stderr) == (2, "transduce: out exists: choose another name, or remove it first\n")


def test_the_report_is_complete_as_text_and_as_json(tmp_path: Path) -> None:
    pairs = sentences(1000)
    pairs[10:10] = [("", "empty"), ("Berlin", "Berlin"), pairs[0], pairs[0]]
    files = write_pairs(tmp_path, "a", pairs)
    as_text = run("prepare", *files, "--out", tmp_path / "out", "--stats")
    parts = ["1,004 pairs read", "dropped: empty", "dropped: duplicate pair", "line 13:", "kept to train on"]
    parts += ["held out for validation", "subwords:", "not padding:", "steps of", "█", "read and clean"]
    for part in parts:
        assert part in as_text.stdout, part
    assert as_text.stderr.splitlines() == [
        "reading a.de + a.en",
        "learning subwords",
        "encoding train",
        "encoding valid",
    ]
    as_json = run("prepare", "--out", tmp_path / "out", "--stats", "--json")
    report = json.loads(as_json.stdout)
    assert report["corpora"][0]["dropped"]["source equals target"] == 1
    assert report["corpora"][0]["dropped"]["duplicate pair"] >= 2
    assert report["corpora"][0]["examples"]["empty"] == [11, "", "empty"]
    assert report["stats"]["n_examples"] == report["train"]["n_pairs"]
    assert sum(bar["n_source"] for bar in report["stats"]["bars"]) == report["stats"]["n_examples"]
    assert 0.8 < report["stats"]["target_non_pad_share"] <= 1


def test_the_corpora_that_prepare_can_take_are_listed(tmp_path: Path) -> None:
    done = run("prepare", "--list")
    assert done.returncode == 0
    listed = re.findall(r"^(\S+)  ", done.stdout, re.MULTILINE)
    assert listed == corpus_names()
    for name, facts in registry().items():
        if name in listed:
            assert facts["from"] in done.stdout
            assert named_corpus(name, "train", None, None if name == BUNDLED_NAME else data_of(name, tmp_path))
        else:
            with pytest.raises(DataError, match=f"{name} has no text to train on, only (trees|valid and test|test): c"):
                find_corpus([name], None)


def data_of(name: str, folder: Path) -> Path:
    """A folder with empty files of the right names."""
    for path in registry()[name]["sha256"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


@pytest.mark.parametrize("names", [("a.de", "b.en"), ("x.y.de.gz", "z.en.xz"), ("a.pt-BR", "a.en")])
def test_languages_are_read_from_file_suffixes(names: tuple[str, str]) -> None:
    plain = [name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[2] for name in names]
    assert languages_of([Path(name) for name in names]) == tuple(plain)


def test_a_changed_folder_is_refused(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        corpus = find_corpus(write_pairs(tmp_path, name, sentences(200, seed)), None)
        prepare([corpus], tmp_path / f"out-{name}", DataConfig())
    (tmp_path / "out-a" / "subwords.model").write_bytes((tmp_path / "out-b" / "subwords.model").read_bytes())
    with pytest.raises(DataError, match=r"train\.tokens was encoded with other subwords"):
        Prepared(tmp_path / "out-a")
    (tmp_path / "out-b" / "report.json").write_text("{}")
    with pytest.raises(DataError, match=r"report\.json is damaged or of another version"):
        Prepared(tmp_path / "out-b")


def test_an_interrupted_run_leaves_no_files(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "a", sentences(60_000))
    process = _start(tmp_path, files)
    _wait_for(tmp_path, "s")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.endswith("transduce: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en"]


@pytest.mark.slow
def test_a_killed_run_leaves_a_complete_folder_or_none(tmp_path: Path) -> None:
    """Runs are killed at forty moments. A complete run after them removes their temporary folders."""
    files = write_pairs(tmp_path, "a", sentences(30_000))
    start = time.monotonic()
    _finish(tmp_path, files)
    duration = time.monotonic() - start
    complete = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "report.json"}
    n_complete, n_left = 0, 0
    for moment in np.linspace(0.2, 1.15, 40) * duration:
        _remove(tmp_path / "out")
        process = _start(tmp_path, files)
        time.sleep(moment)
        process.kill()
        process.communicate()
        n_left += any(path.name.endswith(".unfinished") for path in tmp_path.iterdir())
        if (tmp_path / "out").exists():
            n_complete += 1
            Prepared(tmp_path / "out").train.store.verify()
            assert complete == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.name != "report.json"}
    assert 0 < n_complete < 40
    assert n_left > 0
    _remove(tmp_path / "out")
    _finish(tmp_path, files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en", "out"]


def _start(folder: Path, files: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "transduce", "prepare", *files, "--out", str(folder / "out"), "--processes", "2"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(folder: Path, files: list[str]) -> None:
    process = _start(folder, files)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr


def _wait_for(folder: Path, name: str) -> None:
    """Wait until the process has started to write the file."""
    deadline = time.monotonic() + 20
    while not any(path.name == name for path in folder.rglob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_only_a_corpus_in_reverse_is_merged() -> None:
    files = Path("a.de"), Path("a.en")
    corpus = Corpus("a", files, ("de", "en"))
    assert merge_directions([corpus, corpus]) == [corpus, corpus]


def test_a_model_with_language_tags_keeps_them_when_it_is_tuned_on_one_direction(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "a", sentences(60))
    both = replace(find_corpus(files, None), both_ways=True)
    prepare([both], tmp_path / "both", DataConfig(valid_pairs=0), vocab_size=320)
    subwords = Prepared(tmp_path / "both").subwords
    assert subwords.languages() == ["en", "de"]
    prepare([find_corpus(files, None)], tmp_path / "one", DataConfig(valid_pairs=0), subwords=subwords)
    examples = Prepared(tmp_path / "one").train
    batch = examples.batch(np.array([0]), (60, 60), tiny().model)
    assert batch.source_BS[0, 0] == subwords.tag("en")
    other = write_pairs(tmp_path, "b", sentences(60), "de-fr")
    with pytest.raises(DataError, match="there is no tag for language 'fr': choose from en, de"):
        prepare([find_corpus(other, None)], tmp_path / "none", DataConfig(valid_pairs=0), subwords=subwords)
