"""Words that belong together: lexical links, which heads to ask, what they say, and how wrong that is."""

from __future__ import annotations

import pytest
import torch

from tests.support.primes import prime_config
from transduce import Transformer
from transduce.model_folder.format import AlignmentHeads
from transduce.translation import alignment
from transduce.translation.alignment import (
    choose_heads,
    error_rate,
    lexical_links,
    memory_attention,
    word_links,
    words_of,
)


def test_words_that_come_together_are_linked() -> None:
    """10 is always with 20, 11 with 21, 12 with 22; the order differs."""
    pairs = [([10, 11], [21, 20]), ([11, 12], [22, 21]), ([12, 10], [20, 22]), ([10], [20])]
    assert lexical_links(pairs) == [[(0, 1), (1, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 0)], [(0, 0)]]
    assert lexical_links([([], [1]), ([2], [])]) == [[], []]


def test_pieces_belong_to_words_as_spaces_divide_them() -> None:
    assert words_of(["▁Das", "▁Ha", "us", ".", "▁", "▁x"]) == [0, 1, 1, 1, None, 2]
    assert words_of(["Das", "<0xC3>", "<0xA4>", "<0x09>", "x"]) == [0, 0, 0, None, 1]
    assert words_of(["▁", "▁a"]) == [None, 0]


def test_each_target_word_is_linked_to_what_it_looks_at_most() -> None:
    """Two source words of three pieces and the end mark; the second target word has two pieces."""
    weight_TS = torch.tensor(
        [
            [0.6, 0.1, 0.1, 0.2],
            [0.4, 0.3, 0.2, 0.1],  # alone, this piece would say word 0 or 1 equally
            [0.2, 0.3, 0.4, 0.1],
            [0.1, 0.1, 0.1, 0.7],  # looks at the end: linked to nothing
        ]
    )
    assert word_links(weight_TS, [0, 1, 1], [0, 1, 1, 2]) == [(0, 0), (1, 1)]
    assert word_links(weight_TS[:0], [0], []) == []


def test_the_error_rate_by_hand() -> None:
    """Found 3, sure 2: 1 of the sure and 2 of the possible are right. 1 - (1 + 2) / (3 + 2)."""
    found, sure, possible = [{(0, 0), (1, 2), (2, 2)}], [{(0, 0), (1, 1)}], [{(1, 2)}]
    assert error_rate(found, sure, possible) == pytest.approx(1 - 3 / 5)
    assert error_rate(sure, sure, possible) == 0
    assert error_rate([set()], sure, possible) == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_the_head_that_looks_where_it_should_is_chosen(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that look at the end, but for two: each looks at half of the links, so that both together are right."""
    config = prime_config()
    torch.manual_seed(1)
    pairs = [([10, 11, 12], [22, 20, 21]), ([11, 12], [21, 22]), ([12, 10, 13], [23, 20, 22]), ([13], [23])] * 3
    links = lexical_links(pairs)
    assert all(len(link) == len(pair[0]) for link, pair in zip(links, pairs, strict=True))
    place = {id(pair): link for pair, link in zip(pairs, links, strict=True)}

    def scripted(model: Transformer, some: list[alignment.Pair], device: str) -> torch.Tensor:
        n_source, n_target = (max(len(pair[side]) for pair in some) + 1 for side in (0, 1))
        weight = torch.rand(config.n_decoder_layers, len(some), config.n_heads, n_target, n_source) * 0.1
        for b, pair in enumerate(some):
            weight[:, b, :, :, len(pair[0])] = 0.2  # who has nothing to look at looks at the end
            for s, t in place[id(pair)]:
                weight[0, b, t % 2 + 1, t + shift, s] = 1.0
        return weight

    monkeypatch.setattr(alignment, "memory_attention", scripted)
    found = choose_heads(Transformer(config), pairs, "cpu")
    assert found == AlignmentHeads(layer=0, heads=(1, 2), shift=shift)
    assert choose_heads(Transformer(config), [([], [3])], "cpu") is None


def test_attention_is_asked_for_each_pair_and_dropout_stays_as_it_was() -> None:
    model = Transformer(prime_config()).train()
    choose_heads(model, [([5, 6], [7, 8])] * 3, "cpu")
    assert model.training
    model.eval()
    weight = memory_attention(model, [([5, 6, 7], [8]), ([5], [8, 9])], "cpu")
    assert weight.shape[3:] == (3, 4)
    torch.testing.assert_close(weight[:, 1, :, :, 2:], torch.zeros_like(weight[:, 1, :, :, 2:]))
