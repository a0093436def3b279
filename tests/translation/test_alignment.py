"""Word alignment: lexical links, the choice of heads, links between words, and the alignment error rate."""

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


def test_tokens_that_occur_together_are_linked() -> None:
    """Token 10 always occurs with 20, 11 with 21 and 12 with 22, in different orders."""
    pairs = [([10, 11], [21, 20]), ([11, 12], [22, 21]), ([12, 10], [20, 22]), ([10], [20])]
    assert lexical_links(pairs) == [[(0, 1), (1, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 0)], [(0, 0)]]
    assert lexical_links([([], [1]), ([2], [])]) == [[], []]


def test_pieces_are_assigned_to_words_separated_by_spaces() -> None:
    assert words_of(["▁Das", "▁Ha", "us", ".", "▁", "▁x"]) == [0, 1, 1, 1, None, 2]
    assert words_of(["Das", "<0xC3>", "<0xA4>", "<0x09>", "x"]) == [0, 0, 0, None, 1]
    assert words_of(["▁", "▁a"]) == [None, 0]


def test_each_target_word_is_linked_to_the_source_word_with_the_highest_weight() -> None:
    """The source has words of one and two pieces, and the end mark. The target has words of one, two and one pieces."""
    weight_TS = torch.tensor(
        [
            [0.6, 0.1, 0.1, 0.2],
            [0.4, 0.3, 0.2, 0.1],  # the highest weight is in word 0, but the sum of word 1 is higher
            [0.2, 0.3, 0.4, 0.1],
            [0.1, 0.1, 0.1, 0.7],  # the end mark has the highest weight: no link
        ]
    )
    assert word_links(weight_TS, [0, 1, 1], [0, 1, 1, 2]) == [(0, 0), (1, 1)]
    assert word_links(weight_TS[:0], [0], []) == []


def test_the_error_rate_equals_the_one_computed_by_hand() -> None:
    """Of 3 links, 1 is sure and 2 are possible. There are 2 sure links in all, so the rate is 1 - (1 + 2) / (3 + 2)."""
    links, sure, possible = [{(0, 0), (1, 2), (2, 2)}], [{(0, 0), (1, 1)}], [{(1, 2)}]
    assert error_rate(links, sure, possible) == pytest.approx(1 - 3 / 5)
    assert error_rate(sure, sure, possible) == 0
    assert error_rate([set()], sure, possible) == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_the_heads_that_attend_to_the_linked_words_are_chosen(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads attend to the end mark, except two. Each of the two has half of the links, so their sum is right."""
    config = prime_config()
    torch.manual_seed(1)
    pairs = [([10, 11, 12], [22, 20, 21]), ([11, 12], [21, 22]), ([12, 10, 13], [23, 20, 22]), ([13], [23])] * 3
    links = lexical_links(pairs)
    assert all(len(pair_links) == len(pair[0]) for pair_links, pair in zip(links, pairs, strict=True))
    links_of = {id(pair): pair_links for pair, pair_links in zip(pairs, links, strict=True)}

    def scripted(model: Transformer, batch: list[alignment.Pair], device: str) -> torch.Tensor:
        n_source, n_target = (max(len(pair[side]) for pair in batch) + 1 for side in (0, 1))
        weight = torch.rand(config.n_decoder_layers, len(batch), config.n_heads, n_target, n_source) * 0.1
        for b, pair in enumerate(batch):
            weight[:, b, :, :, len(pair[0])] = 0.2  # without a link, a head attends to the end mark
            for s, t in links_of[id(pair)]:
                weight[0, b, t % 2 + 1, t + shift, s] = 1.0
        return weight

    monkeypatch.setattr(alignment, "memory_attention", scripted)
    heads = choose_heads(Transformer(config), pairs, "cpu")
    assert heads == AlignmentHeads(layer=0, heads=(1, 2), shift=shift)
    assert choose_heads(Transformer(config), [([], [3])], "cpu") is None


def test_choosing_heads_keeps_the_training_mode_and_padding_gets_no_attention() -> None:
    model = Transformer(prime_config()).train()
    choose_heads(model, [([5, 6], [7, 8])] * 3, "cpu")
    assert model.training
    model.eval()
    weight = memory_attention(model, [([5, 6, 7], [8]), ([5], [8, 9])], "cpu")
    assert weight.shape[3:] == (3, 4)
    torch.testing.assert_close(weight[:, 1, :, :, 2:], torch.zeros_like(weight[:, 1, :, :, 2:]))
