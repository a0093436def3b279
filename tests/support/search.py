"""Sentences, rules and results for tests of the search."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.search.candidates import Rules, free
from transduce.search.hypotheses import Hypothesis, Sentence


def rules_of(config: ModelConfig, share: float) -> Rules:
    """Random rules with two states. `share`: the share of forbidden tokens. A hypothesis may end only in state 0."""
    torch.manual_seed(0)
    rules = free(config)
    penalty_AV = rules.penalty_AV.repeat(2, 1).double()
    penalty_AV = penalty_AV.masked_fill(torch.rand(penalty_AV.shape) < share, -torch.inf)
    penalty_AV[0, config.eos_id], penalty_AV[1, config.eos_id] = 0, -torch.inf
    return Rules(penalty_AV, torch.randint(0, 2, penalty_AV.shape))


def sentences_of(n: int, seed: int) -> list[Sentence]:
    torch.manual_seed(seed)
    return [Sentence(i, torch.randint(3, 30, (int(torch.randint(1, 14, ())),)).tolist()) for i in range(n)]


def by_number(results: Iterable[tuple[Sentence, list[Hypothesis]]]) -> dict[int, list[Hypothesis]]:
    return {sentence.number: hypotheses for sentence, hypotheses in results}


def sources(n: int, longest: int, seed: int, pad_id: int) -> Tensor:
    torch.manual_seed(seed)
    ids_BS = torch.randint(3, 30, (n, longest))
    for row, length in enumerate(torch.randint(1, longest + 1, (n,)).tolist()):
        ids_BS[row, length:] = pad_id
    return ids_BS
