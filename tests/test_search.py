"""Search on scripted models, whose answers are worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.primes import prime_config
from transduce import greedy

CONFIG = prime_config()
A, B, C, END = 5, 7, 11, CONFIG.eos_id


@dataclass(frozen=True)
class Script:
    """What each row has seen so far."""

    past: list[tuple[int, ...]]

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Script:
        return Script([self.past[i] for i in rows_R.tolist()])

    def join(self, other: Script) -> Script:
        return Script(self.past + other.past)


class ScriptedModel:
    """Next-token probabilities by prefix; an unlisted prefix ends."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.table = table

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Script:
        return Script([()] * len(source_BS))

    def step(self, last_R: Tensor, state: Script) -> tuple[Tensor, Script]:
        state = Script([(*past, int(i)) for past, i in zip(state.past, last_R, strict=True)])
        logits_RV = torch.full((len(state.past), CONFIG.target_vocab_size), -torch.inf)
        for row, past in enumerate(state.past):
            for token, probability in self.table.get(past[1:], {END: 1.0}).items():
                logits_RV[row, token] = torch.tensor(probability).log()
        return logits_RV, state


def source(*lengths: int) -> Tensor:
    ids_BS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, n in zip(ids_BS, lengths, strict=True):
        row[:n] = 9
    return ids_BS


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    model = ScriptedModel({(): {A: 0.6, B: 0.4}, (A,): {END: 0.1, A: 0.5, B: 0.4}, (A, A): {END: 0.3, C: 0.7}})
    assert greedy(model, CONFIG, source(3), 50) == [[A, A, C]]


def test_greedy_stops_at_source_length_plus_extra_for_each_sentence() -> None:
    for_ever = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    assert greedy(for_ever, CONFIG, source(1, 3), 2) == [[A] * 3, [A] * 5]
    assert greedy(for_ever, CONFIG, source(1, 0), 0) == [[A], []]
    assert greedy(for_ever, CONFIG, source(0), 0) == [[]]


def test_greedy_leaves_out_the_end_and_all_that_follows() -> None:
    model = ScriptedModel({(): {END: 0.9, A: 0.1}, (END,): {A: 1.0}})
    assert greedy(model, CONFIG, source(4, 2), 50) == [[], []]
