"""Each rule drops what it names, under its name, and keeps what people write."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce import DataConfig
from transduce.data.cleaning import CHUNK, Seen, clean, in_wrong_script, letter_share

GOOD = [
    ("Das ist ein Haus.", "This is a house."),
    ("Ja.", "Yes, I will come."),
    ("Tab\there", "Tab\there too"),
    ("Ein Haus", "A house"),
    ("Das ist ein Haus.", "That is a house."),
    ("Wie geht's, José?", "How are you, José?"),
    ("3 Äpfel", "3 apples"),
]
PLANTED: dict[str, Sequence[tuple[str, str] | tuple[bytes, bytes]]] = {
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


def test_planted_pairs_are_dropped_and_counted_under_their_rule() -> None:
    pairs = [raw(pair) for pair in GOOD] + [raw(pair) for planted in PLANTED.values() for pair in planted]
    dropped: Counter[str] = Counter()
    assert list(clean(pairs, DataConfig(), "de", "en", dropped)) == GOOD
    assert dropped == {name: len(planted) for name, planted in PLANTED.items()}


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("de", "Straße"), ("vi", "Tiếng Việt"), ("ru", "привет"), ("sr", "zdravo"), ("sr", "здраво"),
        ("ja", "カタカナとひらがな漢字ー"), ("ko", "한국어"), ("zh", "中文"), ("zh-TW", "中文"),
        ("pt_BR", "ação"), ("ar", "مرحبا"), ("he", "שלום"), ("hi", "नमस्ते"),
        ("el", "γειά"), ("th", "สวัสดี"), ("xx", "whatever мы"), ("en", "123"), ("en", "GPU für мы and more"),
    ],
)  # fmt: skip
def test_languages_in_their_own_script_pass(language: str, text: str) -> None:
    assert not in_wrong_script(text, language)


@pytest.mark.parametrize(
    ("language", "text"), [("de", "привет"), ("ru", "hello"), ("zh", "hello"), ("ja", "한국어"), ("EN", "中文")]
)
def test_languages_in_another_script_do_not(language: str, text: str) -> None:
    assert in_wrong_script(text, language)


def test_marks_count_as_letters() -> None:
    assert letter_share("नमस्ते") == 1
    assert letter_share("a 1") == 0.5
    assert letter_share("") == 0


def test_settings_reach_the_rules() -> None:
    def kept(pair: tuple[str, str], config: DataConfig) -> bool:
        return bool(list(clean([raw(pair)], config, "de", "en", Counter())))

    assert not kept(("Guten Tag", "Good day"), DataConfig(max_characters=8))
    assert kept(("Guten Tag", "Good day"), DataConfig(max_characters=9))
    assert kept(("12 Uhr", "12 o'clock"), DataConfig(min_letter_share=0.5))
    assert not kept(("12 Uhr", "12 o'clock"), DataConfig(min_letter_share=0.7))
    assert not kept(("Ja.", "Yes, I will come to you."), DataConfig(max_length_ratio=1.0))


def test_duplicates_are_found_across_chunks_and_the_first_is_kept() -> None:
    pairs = [(f"Wort {i % (CHUNK + 7)}", f"word {i % (CHUNK + 7)}") for i in range(3 * CHUNK)]
    dropped: Counter[str] = Counter()
    found = list(clean(map(raw, pairs), DataConfig(min_letter_share=0.0), "de", "en", dropped))
    assert found == list(dict.fromkeys(pairs))
    assert dropped == {"duplicate pair": len(pairs) - len(found)}
    assert len(found) < len(pairs)


@given(st.lists(st.lists(st.integers(0, 50) | st.integers(2**64 - 50, 2**64 - 1), max_size=30), max_size=20))
def test_seen_is_a_set(chunks: list[list[int]]) -> None:
    seen, known = Seen(), set[int]()
    for chunk in chunks:
        expected = []
        for number in chunk:
            expected.append(number not in known)
            known.add(number)
        assert seen.add(chunk) == expected
    assert sorted(int(n) for run in seen.runs for n in run) == sorted(known)


def test_seen_keeps_few_runs() -> None:
    seen, rng = Seen(), random.Random(0)
    for _ in range(300):
        seen.add([rng.getrandbits(64) for _ in range(100)])
    assert len(seen.runs) <= 16
    assert sum(map(len, seen.runs)) == 30_000
