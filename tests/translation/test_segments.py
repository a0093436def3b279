"""Splitting of long text: no text is lost, no segment is too long, and cuts are at the best boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transduce.translation.segments import longest_repeat, split


def words(text: str) -> int:
    return len(text.split())


@given(st.text(alphabet="ab .,!\u0301。、\t", max_size=60), st.integers(1, 9))
def test_joined_segments_are_the_text_and_none_is_too_long(text: str, max_tokens: int) -> None:
    segments = split(text, len, max_tokens)
    assert "".join(segment.text + segment.gap for segment in segments) == text
    for segment in segments:
        # A character and its combining marks are never cut, so they may be too long.
        assert len(segment.text) <= max_tokens or len(segment.text.replace("\u0301", "")) <= 1


def test_text_is_cut_between_sentences_if_possible() -> None:
    text = "One two three. Four five (six seven.) Eight nine! Ten."
    assert [s.text for s in split(text, words, 5)] == ["One two three.", "Four five (six seven.)", "Eight nine! Ten."]
    assert [s.text for s in split(text, words, 99)] == [text]


def test_a_long_sentence_is_cut_between_clauses_else_words_else_characters() -> None:
    text = "one two, three four; five six seven eight nine. Ten."
    assert [s.text for s in split(text, words, 4)] == ["one two, three four;", "five six seven eight", "nine. Ten."]
    assert [s.text for s in split("abcdefghijkl mn", len, 4)] == ["abc", "def", "ghi", "jkl", "mn"]
    assert [s.text for s in split("你好。再见。", len, 3)] == ["你好。", "再见。"]
    assert [s.text for s in split("aa\u0301\u0301", len, 1)] == ["a", "a\u0301\u0301"]


def test_white_space_between_segments_is_kept() -> None:
    assert split("A b.  C d.", words, 2) == [("A b.", "  "), ("C d.", "")]


def test_the_longest_repetition_is_measured() -> None:
    assert longest_repeat([1, 2, 3, 4, 5]) == 0
    assert longest_repeat([7, 7, 7]) == 0, "a repetition has at least four copies"
    assert longest_repeat([7, 7, 7, 7]) == 4
    assert longest_repeat([9, 1, 2, 1, 2, 1, 2, 1, 2, 1, 8]) == 9
    assert longest_repeat([1, 2, 3] * 6) == 18
    assert longest_repeat(list(range(11)) * 4) == 0, "the repeated unit may have at most 10 tokens"
