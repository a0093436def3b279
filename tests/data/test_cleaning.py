"""Each cleaning rule drops bad pairs, is counted under its name, and keeps ordinary text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce import DataConfig, DataError
from transduce.data.cleaning import (
    CHUNK,
    HashSet,
    Tally,
    clean,
    in_wrong_script,
    keep_all,
    letter_share,
    mostly_non_letters,
    scripts_of,
    share_of_other_scripts,
)

GOOD = [
    ("Das ist ein Haus.", "This is a house."),
    ("Ja.", "Yes, I will come."),
    ("Tab\there", "Tab\there too"),
    ("Ein Haus", "A house"),
    ("Das ist ein Haus.", "That is a house."),
    ("Wie geht's, José?", "How are you, José?"),
    ("3 Äpfel", "3 apples"),
]
BAD: dict[str, Sequence[tuple[str, str] | tuple[bytes, bytes]]] = {
    "not valid UTF-8": [(b"\xff\xfe", b"fine"), (b"gut", b"\xed\xa0\x80"), (b"gut", b"\xc3")],
    "control characters": [
        ("a\x00b", "a b"),
        ("a", "b\x1b[0m"),
        ("zwei\nZeilen", "two lines"),
        ("a\u2028b", "a"),
        ("\ufffd", "a"),
    ],
    "empty": [("", "x"), ("x", ""), ("", ""), ("  \t", "x"), ("x", "\u00a0")],
    "too long": [("a" * 1001, "b" * 1001), ("kurz", "long " * 201)],
    "length ratio": [("Ja.", "This goes on and on and on and on."), ("wort " * 30, "word")],
    "source equals target": [("Berlin", "Berlin"), ("BERLIN ", "berlin")],
    "mostly non-letters": [("12.3.2004 (4)", "12/3/2004 (4)."), ("Haus", "***...")],
    "wrong script": [("Это дом", "This is a house"), ("Das ist", "これは家です")],
    "duplicate pair": [GOOD[0], GOOD[0], GOOD[3]],
}


def raw(pair: tuple[str, str] | tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    source, target = (text.encode() if isinstance(text, str) else text for text in pair)
    return source, target


def cleaned(
    pairs: Iterable[tuple[bytes, bytes]], config: DataConfig, tally: Tally, n_processes: int = 1
) -> list[tuple[str, str]]:
    parts = clean(pairs, config, ("de", "en"), tally, n_processes=n_processes)
    return [(source.decode(), target.decode()) for part in parts for source, target in part.pairs]


def test_bad_pairs_are_dropped_and_counted_under_their_rule() -> None:
    pairs = [raw(pair) for pair in GOOD] + [raw(pair) for bad in BAD.values() for pair in bad]
    tally = Tally()
    assert cleaned(pairs, DataConfig(), tally) == GOOD
    assert tally.n_read == len(pairs)
    assert tally.dropped == {name: len(bad) for name, bad in BAD.items()}
    line = len(GOOD) + 1
    for name, bad in BAD.items():  # the first pair of each rule is reported, with its line
        source, target = raw(bad[0])
        assert tally.examples[name].line == line
        assert tally.examples[name].source == source[:200].decode(errors="backslashreplace")
        assert tally.examples[name].target == target[:200].decode(errors="backslashreplace")
        line += len(bad)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("de", "Straße"),
        ("vi", "Tiếng Việt"),
        ("ru", "привет"),
        ("sr", "zdravo"),
        ("sr", "здраво"),
        ("ja", "カタカナとひらがな漢字ー"),
        ("ko", "한국어"),
        ("zh", "中文"),
        ("zh-TW", "中文"),
        ("pt_BR", "ação"),
        ("ar", "مرحبا"),
        ("he", "שלום"),
        ("hi", "नमस्ते"),
        ("el", "γειά"),
        ("th", "สวัสดี"),
        ("xx", "whatever мы"),
        ("en", "123"),
        ("en", "GPU für мы and more"),
    ],
)
def test_text_in_a_script_of_the_language_passes(language: str, text: str) -> None:
    assert not in_wrong_script(text, language)


@pytest.mark.parametrize(
    ("language", "text"), [("de", "привет"), ("ru", "hello"), ("zh", "hello"), ("ja", "한국어"), ("EN", "中文")]
)
def test_text_in_another_script_is_detected(language: str, text: str) -> None:
    assert in_wrong_script(text, language)


def test_combining_marks_count_as_letters() -> None:
    assert letter_share("नमस्ते") == 1
    assert letter_share("a 1") == 0.5
    assert letter_share("") == 0


def test_rules_use_the_configuration() -> None:
    def kept(pair: tuple[str, str], config: DataConfig) -> bool:
        return bool(cleaned([raw(pair)], config, Tally()))

    assert not kept(("Guten Tag", "Good day"), DataConfig(max_characters=8))
    assert kept(("Guten Tag", "Good day"), DataConfig(max_characters=9))
    assert kept(("12 Uhr", "12 o'clock"), DataConfig(min_letter_share=0.5))
    assert not kept(("12 Uhr", "12 o'clock"), DataConfig(min_letter_share=0.7))
    assert not kept(("Ja.", "Yes, I will come to you."), DataConfig(max_length_ratio=1.0))


def test_the_first_of_duplicates_is_kept_also_across_chunks() -> None:
    pairs = [(f"Wort {i % (CHUNK + 7)}", f"word {i % (CHUNK + 7)}") for i in range(3 * CHUNK)]
    tally = Tally()
    kept = cleaned(map(raw, pairs), DataConfig(min_letter_share=0.0), tally)
    assert kept == list(dict.fromkeys(pairs))
    assert tally.dropped == {"duplicate pair": len(pairs) - len(kept)}
    assert tally.examples["duplicate pair"] == (CHUNK + 8, "Wort 0", "word 0")
    assert len(kept) < len(pairs)


def test_two_processes_give_the_same_result_as_one() -> None:
    rng = random.Random(0)

    def text() -> bytes:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz äöü 0123456789.,;%*", k=rng.randrange(40))).encode()

    pairs = [(text(), text()) for _ in range(2 * CHUNK + 5)]
    pairs += pairs[:100]
    one, two = Tally(), Tally()
    assert cleaned(pairs, DataConfig(), one) == cleaned(pairs, DataConfig(), two, n_processes=2)
    assert one == two
    assert len(one.dropped) >= 4


def test_pairs_of_an_earlier_corpus_count_as_duplicates() -> None:
    seen, tally = HashSet(), Tally()
    for _ in range(2):
        list(clean([raw(GOOD[0])], DataConfig(), ("de", "en"), tally, seen))
    assert (tally.n_read, tally.dropped) == (2, {"duplicate pair": 1})


@settings(max_examples=300)
@given(st.text(min_size=1) | st.text("abcXYZ äß1 .-я", min_size=1), st.floats(0, 0.99))
def test_fast_paths_agree_with_the_slow_rules(text: str, share: float) -> None:
    text = text.encode(errors="ignore").decode() or "."
    assert mostly_non_letters(text, share) == (letter_share(text) < share)
    for language in ("de", "ru", "sr", "ja", "xx"):
        scripts = scripts_of(language)
        assert in_wrong_script(text, language) == (bool(scripts) and share_of_other_scripts(text, scripts) > 0.5)


def test_keep_all_keeps_every_pair_and_refuses_invalid_lines() -> None:
    files = Path("a.de"), Path("a.en")
    pairs = [raw(pair) for name, bad in BAD.items() for pair in bad if name != "not valid UTF-8"]
    pairs = [pair for pair in pairs if b"\n" not in pair[0]]
    tally = Tally()
    assert [pair for part in keep_all(pairs, files, tally) for pair in part.pairs] == pairs
    assert (tally.n_read, tally.dropped) == (len(pairs), {})
    with pytest.raises(DataError, match=re.escape("a.en, line 3, byte 2: not valid UTF-8: correct it")):
        list(keep_all([*pairs[:2], (b"gut", b"g\xff")], files, tally))
    with pytest.raises(DataError, match=re.escape("a.de, line 1: a line break inside a sentence")):
        list(keep_all([(b"zwei\nZeilen", b"two")], files, tally))


@given(st.lists(st.lists(st.integers(0, 50) | st.integers(2**64 - 50, 2**64 - 1), max_size=30), max_size=20))
def test_hash_set_equals_a_python_set(chunks: list[list[int]]) -> None:
    seen, known = HashSet(), set[int]()
    for chunk in chunks:
        expected = []
        for number in chunk:
            expected.append(number not in known)
            known.add(number)
        assert seen.add(np.array(chunk, dtype=np.uint64)).tolist() == expected
    assert sorted(int(n) for run in seen.runs for n in run) == sorted(known)


def test_hash_set_keeps_few_runs() -> None:
    seen, rng = HashSet(), random.Random(0)
    for _ in range(300):
        seen.add(np.array([rng.getrandbits(64) for _ in range(100)], dtype=np.uint64))
    assert len(seen.runs) <= 16
    assert sum(map(len, seen.runs)) == 30_000
