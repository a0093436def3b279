"""Rules that make every translation one line of valid UTF-8, as an automaton for the search."""

# Axes: V vocabulary, A states.

from __future__ import annotations

import re

import torch

from transduce.config import ModelConfig
from transduce.data.subword import Subwords
from transduce.search.candidates import Rules

LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""All characters that some programs treat as the end of a line."""

# States, named after the bytes that must follow or have come.
START, ONE, TWO, THREE = range(4)  # the number of continuation bytes that must follow
AFTER_E0, AFTER_ED, AFTER_F0, AFTER_F4 = range(4, 8)  # the second byte is restricted: no overlong forms, no surrogates
AFTER_C2, AFTER_E2, AFTER_E2_80 = range(8, 11)  # could become U+0085, U+2028 or U+2029
N_STATES = 11


def transitions() -> dict[tuple[int, int], int]:
    """(state, byte) -> state for the allowed bytes: RFC 3629's table of well-formed UTF-8 without the line breaks."""
    more = range(0x80, 0xC0)
    table = {(START, byte): START for byte in range(0x80) if chr(byte) not in LINE_BREAKS}
    leads = {ONE: range(0xC3, 0xE0), TWO: [0xE1, *range(0xE3, 0xED), 0xEE, 0xEF], THREE: range(0xF1, 0xF4)}
    leads |= {
        AFTER_E0: [0xE0],
        AFTER_ED: [0xED],
        AFTER_F0: [0xF0],
        AFTER_F4: [0xF4],
        AFTER_C2: [0xC2],
        AFTER_E2: [0xE2],
    }
    table |= {(START, byte): state for state, lead_bytes in leads.items() for byte in lead_bytes}
    follows = [
        (ONE, more, START),
        (TWO, more, ONE),
        (THREE, more, TWO),
        (AFTER_E0, range(0xA0, 0xC0), ONE),
        (AFTER_ED, range(0x80, 0xA0), ONE),
        (AFTER_F0, range(0x90, 0xC0), TWO),
        (AFTER_F4, range(0x80, 0x90), TWO),
        (AFTER_C2, more, START),
        (AFTER_E2, more, ONE),
        (AFTER_E2_80, more, START),
    ]
    table |= {(state, byte): after for state, bytes_, after in follows for byte in bytes_}
    table[AFTER_E2, 0x80] = AFTER_E2_80
    for state, byte in ((AFTER_C2, 0x85), (AFTER_E2_80, 0xA8), (AFTER_E2_80, 0xA9)):
        del table[state, byte]
    return table


def one_line(subwords: Subwords, config: ModelConfig) -> Rules:
    """Forbids line breaks, bytes that UTF-8 does not allow, and all marks and tags; the end mark only inside a
    character."""
    pieces = subwords.pieces(range(len(subwords)))
    byte_of = {i: int(match[1], 16) for i, p in enumerate(pieces) if (match := re.fullmatch("<0x([0-9A-F]{2})>", p))}
    table = transitions()
    penalty_AV = torch.full((N_STATES, config.target_vocab_size), -torch.inf)
    next_AV = torch.zeros(N_STATES, config.target_vocab_size, dtype=torch.long)
    for i, piece in enumerate(pieces):
        if i in byte_of:
            for state in range(N_STATES):
                if (after := table.get((state, byte_of[i]))) is not None:
                    penalty_AV[state, i], next_AV[state, i] = 0.0, after
        elif i == config.eos_id or not (subwords.is_special(i) or set(piece) & set(LINE_BREAKS)):
            penalty_AV[START, i] = 0.0
    return Rules(penalty_AV, next_AV)


def whole_characters(ids: list[int], rules: Rules) -> list[int]:
    """Drops the first bytes of a character that was cut at the limit."""
    state, n_whole = START, 0
    for place, i in enumerate(ids, 1):
        state = int(rules.next_AV[state, i])
        n_whole = place if state == START else n_whole
    return ids[:n_whole]
