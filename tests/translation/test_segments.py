"""Long text in parts: nothing lost, nothing too long, and cut where a reader would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transduce.translation.segments import longest_repeat, split


def words(text: str) -> int:
    return len(text.split())


@given(st.text(alphabet="ab .,!\u0301。、\t", max_size=60), st.integers(1, 9))
def test_parts_make_up_the_text_and_none_is_too_long(text: str, most: int) -> None:
    segments = split(text, len, most)
    assert "".join(segment.text + segment.gap for segment in segments) == text
    for segment in segments:
        # One character and the marks on it are never cut.
        assert len(segment.text) <= most or len(segment.text.replace("\u0301", "")) <= 1


def test_it_is_cut_between_sentences_where_that_is_enough() -> None:
    text = "One two three. Four five (six seven.) Eight nine! Ten."
    assert [s.text for s in split(text, words, 5)] == ["One two three.", "Four five (six seven.)", "Eight nine! Ten."]
    assert [s.text for s in split(text, words, 99)] == [text]


def test_then_between_clauses_then_between_words_then_anywhere() -> None:
    text = "one two, three four; five six seven eight nine. Ten."
    assert [s.text for s in split(text, words, 4)] == ["one two, three four;", "five six seven eight", "nine. Ten."]
    assert [s.text for s in split("abcdefghijkl mn", len, 4)] == ["abc", "def", "ghi", "jkl", "mn"]
    assert [s.text for s in split("你好。再见。", len, 3)] == ["你好。", "再见。"]
    assert [s.text for s in split("aa\u0301\u0301", len, 1)] == ["a", "a\u0301\u0301"]


def test_gaps_are_kept_as_they_were() -> None:
    assert split("A b.  C d.", words, 2) == [("A b.", "  "), ("C d.", "")]


def test_what_is_said_over_and_over_is_measured() -> None:
    assert longest_repeat([1, 2, 3, 4, 5]) == 0
    assert longest_repeat([7, 7, 7]) == 0, "three times is emphasis"
    assert longest_repeat([7, 7, 7, 7]) == 4
    assert longest_repeat([9, 1, 2, 1, 2, 1, 2, 1, 2, 1, 8]) == 9
    assert longest_repeat([1, 2, 3] * 6) == 18
    assert longest_repeat(list(range(11)) * 4) == 0, "longer than any unit that is looked for"
