"""A translation is always one line of valid UTF-8, for any model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce import DecodeConfig, Transformer, tiny, with_model
from transduce.data.subword import Subwords
from transduce.search.hypotheses import Sentence
from transduce.search.loop import search
from transduce.search.spelling import LINE_BREAKS, START, one_line, transitions, whole_characters


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.train(["ein Haus am See", "zwei Häuser\u2028am See", "a\x0bb"] * 9, 300, ["de", "en"])


def accepts(data: bytes) -> bool:
    table, state = transitions(), START
    for byte in data:
        if (state, byte) not in table:
            return False
        state = table[state, byte]
    return state == START


def is_one_line(data: bytes) -> bool:
    try:
        return not set(data.decode()) & set(LINE_BREAKS)
    except UnicodeDecodeError:
        return False


@pytest.mark.slow
def test_the_automaton_is_right_for_every_short_string_of_bytes() -> None:
    """All strings of one and two bytes; of three and four bytes, each end of each range in the table of UTF-8."""
    edges = [0x00, 0x0A, 0x41, 0x7F, 0x80, 0x85, 0x8F, 0x90, 0x9F, 0xA0, 0xA8, 0xA9, 0xAA, 0xBF, 0xC0, 0xC2]
    edges += [0xDF, 0xE0, 0xE1, 0xE2, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    strings = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    strings += [bytes([a, b, c]) for a in edges for b in edges for c in edges]
    strings += [bytes([a, b, c, 0x80]) for a in edges for b in edges for c in edges]
    for data in strings:
        assert accepts(data) == is_one_line(data), data


@given(st.text())
def test_the_automaton_accepts_exactly_text_without_line_breaks(text: str) -> None:
    assert accepts(text.encode()) == (not set(text) & set(LINE_BREAKS))


def test_line_breaks_are_those_of_splitlines() -> None:
    every = {chr(i) for i in range(0x110000) if len(f"a{chr(i)}b".splitlines()) > 1}
    assert set(LINE_BREAKS) == every


def test_samples_of_an_untrained_model_are_single_lines(subwords: Subwords) -> None:
    """With the rules each sample is a line of valid UTF-8; without them few are."""
    config = with_model(
        tiny(), source_vocab_size=len(subwords), target_vocab_size=len(subwords), n_encoder_layers=1, n_decoder_layers=1
    )
    torch.manual_seed(1)
    model = Transformer(config.model).eval()
    rules = one_line(subwords, config.model)
    settings = DecodeConfig(method="sample", n_best=8, temperature=3.0, max_extra_tokens=20)
    sentences = [Sentence(i, [4, 5, config.model.eos_id]) for i in range(8)]
    samples = [h for _, hypotheses in search(model, config.model, sentences, settings, rules) for h in hypotheses]
    texts = subwords.decode([whole_characters(h.ids, rules) for h in samples])
    for text in texts:
        assert not set(text) & set(LINE_BREAKS)
        assert "\ufffd" not in text
    assert sum(any(not c.isascii() for c in text) for text in texts) > 10, "some characters must be written as bytes"
    free = [h.ids for _, hypotheses in search(model, config.model, sentences, settings) for h in hypotheses]
    assert sum("\ufffd" in text or bool(set(text) & set(LINE_BREAKS)) for text in subwords.decode(free)) > 10


def test_marks_and_tags_are_forbidden(subwords: Subwords) -> None:
    config = with_model(tiny(), source_vocab_size=len(subwords), target_vocab_size=len(subwords)).model
    rules = one_line(subwords, config)
    forbidden = {i for i in range(len(subwords)) if rules.penalty_AV[0, i] < 0}
    assert {config.pad_id, config.bos_id, subwords.tag("de"), subwords.tag("en")} <= forbidden
    assert config.eos_id not in forbidden
    assert not (rules.penalty_AV[1:, config.eos_id] == 0).any(), "no end inside a character"
    with_line_breaks = [
        i for i, piece in enumerate(subwords.pieces(range(len(subwords)))) if "\u2028" in piece or "\x0b" in piece
    ]
    assert set(with_line_breaks) <= forbidden
    assert with_line_breaks, "no piece contains a line break, so this test shows nothing"


def test_a_character_that_was_cut_at_the_limit_is_dropped(subwords: Subwords) -> None:
    config = with_model(tiny(), source_vocab_size=len(subwords), target_vocab_size=len(subwords)).model
    rules = one_line(subwords, config)
    (ids,) = subwords.encode(["ein 😀"])
    assert len(ids) > 4
    for n in range(len(ids) + 1):
        text = subwords.decode([whole_characters(ids[:n], rules)])[0]
        assert "ein 😀".startswith(text)
    assert whole_characters(ids, rules) == ids
    assert len(whole_characters(ids[:-1], rules)) == len(ids) - 4
