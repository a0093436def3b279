"""Reading corpora loses and shifts no line, and refuses unreadable files with file, line and remedy."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce import DataError
from transduce.data.corpora import find_corpus, read_jsonl, read_lines, read_pairs, read_tsv

LINES = [
    b"one",
    b"",
    b"two\xe2\x80\xa8half",
    b"three\x00\x0b\x0c\x1c\xc2\x85",
    b"\xff not text",
    b"x" * 1_000_000,
    b"end",
]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("has_final_line_end", [True, False], ids=["final line end", "no final line end"])
def test_only_line_feeds_end_lines(
    tmp_path: Path, suffix: str, pack: object, end: bytes, has_final_line_end: bool
) -> None:
    assert callable(pack)
    file = tmp_path / f"text{suffix}"
    file.write_bytes(pack(end.join(LINES) + (end if has_final_line_end else b"")))
    assert list(read_lines(file)) == LINES


@settings(max_examples=200)
@given(st.lists(st.binary().filter(lambda line: b"\n" not in line and not line.endswith(b"\r")), min_size=1))
def test_lines_of_arbitrary_bytes_round_trip(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    lines = [b"first", *lines, b"last"]
    file = tmp_path_factory.mktemp("any") / "text"
    file.write_bytes(b"\n".join(lines))
    assert list(read_lines(file)) == lines


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert list(read_lines(tmp_path / "a")) == [b"one", b"\xef\xbb\xbftwo"]


def test_files_of_unequal_length_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n3\n")
    (tmp_path / "b").write_bytes(b"1\n2\n")
    pairs = read_pairs(tmp_path / "a", tmp_path / "b")
    assert [next(pairs), next(pairs)] == [(b"1", b"1"), (b"2", b"2")]
    with pytest.raises(DataError, match=r"b ends after line 2, but .*a is longer: each line needs its translation"):
        next(pairs)
    with pytest.raises(DataError, match=r"b ends after line 2, but .*a is longer"):
        list(read_pairs(tmp_path / "b", tmp_path / "a"))
    assert list(read_pairs(tmp_path / "a", tmp_path / "a"))[-1] == (b"3", b"3")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be read \(No such file or directory\): give a file"):
        list(read_lines(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        list(read_lines(tmp_path))
    for suffix, packed in ((".gz", gzip.compress(b"text\n" * 1000)), (".xz", lzma.compress(b"text\n" * 1000))):
        file = tmp_path / f"cut{suffix}"
        file.write_bytes(packed[:-9])
        with pytest.raises(DataError, match=rf"cut{suffix} is damaged \(.*\): copy it again"):
            list(read_lines(file))
        file.write_bytes(b"plain text")
        with pytest.raises(DataError, match=rf"cut{suffix} is damaged \(.*\): copy it again"):
            list(read_lines(file))
    (tmp_path / "utf16").write_text("hallo\n", encoding="utf-16")
    with pytest.raises(
        DataError, match=r"utf16, line 1: the file is UTF-16, must be UTF-8: iconv -f UTF-16 -t UTF-8 .*utf16"
    ):
        list(read_lines(tmp_path / "utf16"))


def test_columns_of_a_tsv_file(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_bytes(b"1\tein\tone\n2\tzwei\ttwo\textra\n3\tdrei\n")
    pairs = read_tsv(file, columns=(3, 2))
    assert [next(pairs), next(pairs)] == [(b"one", b"ein"), (b"two", b"zwei")]
    with pytest.raises(DataError, match=r"a.tsv, line 3: has 2 columns, must have 3: correct the line"):
        next(pairs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not a JSON object: correct the line"),
        ("3", "line 2: is not a JSON object"),
        ('["de"]', "line 2: is not a JSON object"),
        ("[" * 100_000, "line 2: is not a JSON object"),
        ('{"de": "x"}', "line 2: has no field 'en': correct the line, or name other fields"),
        ('{"de": "x", "en": 3}', "line 2: field 'en' is 3, must be text"),
    ],
)
def test_fields_of_a_jsonl_file(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    good = json.dumps({"de": "zwei\nZeilen \ud800", "en": "é", "id": 3})
    file.write_text(f"{good}\n{line}\n")
    pairs = read_jsonl(file, ("de", "en"))
    assert next(pairs) == (b"zwei\nZeilen \xed\xa0\x80", "é".encode())
    with pytest.raises(DataError, match=message):
        next(pairs)


HUGGING_FACE = {"translation": {"cs": "Dobrý den.", "en": "Good day."}}


@pytest.mark.parametrize(
    ("languages", "fields", "expected"),
    [
        (None, None, ("cs", "en")),
        (("en", "cs"), None, ("en", "cs")),
        (None, ("translation.en", "translation.cs"), ("en", "cs")),
        (("en", "cs"), ("translation.en", "translation.cs"), ("en", "cs")),
    ],
)
def test_jsonl_in_the_form_of_hugging_face_names_its_languages(
    tmp_path: Path, languages: tuple[str, str] | None, fields: tuple[str, str] | None, expected: tuple[str, str]
) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{json.dumps(HUGGING_FACE)}\n")
    corpus = find_corpus([str(tmp_path / "a.jsonl")], languages, fields=fields)
    assert corpus.languages == expected
    texts = HUGGING_FACE["translation"]
    assert list(corpus.read([])) == [(b"", b""), (texts[expected[0]].encode(), texts[expected[1]].encode())]


@pytest.mark.parametrize(
    ("record", "languages", "message"),
    [
        (
            {"translation": {"cs": "a", "de": "b", "en": "c"}},
            None,
            "has texts in cs, de, en: add --languages, .* cs-de",
        ),
        ({"translation": {"cs": "a"}}, None, "languages of .* are not known: add --languages"),
        ({"translation": {"source text": "a", "en": "b"}}, None, "languages of .* are not known: add --languages"),
        ({"translation": "a", "en": "b"}, None, "languages of .* are not known: add --languages"),
        ([1], None, "languages of .* are not known: add --languages"),
        ({"translation": {"cs": "a", "en": "b"}}, ("cs", "de"), "line 1: has no field 'cs'"),
        ({"translation": {"cs": None, "en": "b"}}, None, "line 1: field 'translation.cs' is None, must be text"),
    ],
    ids=str,
)
def test_other_jsonl_needs_languages(
    tmp_path: Path, record: object, languages: tuple[str, str] | None, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        list(find_corpus([str(tmp_path / "a.jsonl")], languages).read([]))


def test_fields_with_the_names_of_the_languages_come_before_those_inside_translation(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"cs": "jedna", "en": "one", **HUGGING_FACE}))
    assert list(find_corpus([str(tmp_path / "a.jsonl")], ("cs", "en")).read([])) == [(b"jedna", b"one")]
