"""Word alignment from the decoder's attention to the memory, and the choice of the heads that align best.

The choice needs no human annotation: attention is compared with the links on which two lexical models agree (Brown et
al. 1993, model 1), one for each direction of translation.
"""

# Axes: L layers, B sentences, H heads, T target positions, S source positions, N links, X shifts.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transduce.data.batches import make_batch
from transduce.data.subword import SPACE_MARK
from transduce.model import Output, Transformer
from transduce.model_folder.format import AlignmentHeads

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a source and its target, without start and end marks."""
Link = tuple[int, int]
"""A source word and a target word, by their indices from 0."""
LinkedAttention = tuple[NDArray[np.float32], NDArray[np.int64]]
"""weight_XLHNS of the links of one pair, and the source position of each link."""

N_ITERATIONS = 5
MAX_PAIRS, MAX_LINKS = 10_000, 3_000_000
"""Training data of the lexical models. It takes one or two seconds and some 200 MB."""
MAX_COMPARED_PAIRS, MAX_WEIGHTS = 300, 20_000_000
"""Pairs on which heads are compared, and the highest number of their attention weights: 80 MB."""
BATCH = 16


def lexical_links(pairs: Sequence[Pair]) -> list[list[Link]]:
    """For each pair, the links that model 1 gives in both directions."""
    forward = _best_links(pairs)
    backward = _best_links([(target, source) for source, target in pairs])
    return [
        sorted({(s, t) for t, s in enumerate(source_of)} & {(s, t) for s, t in enumerate(target_of)})
        for source_of, target_of in zip(forward, backward, strict=True)
    ]


def _best_links(pairs: Sequence[Pair]) -> list[list[int]]:
    """For each target token, the source position with the highest probability in model 1."""
    source_N, target_N, token_N = _all_links(pairs)
    n_targets = int(target_N.max(initial=0)) + 1
    entry, inverse_N = np.unique(source_N * n_targets + target_N, return_inverse=True)
    entry_source = entry // n_targets
    probability = np.full(len(entry), 1.0 / n_targets)
    for _ in range(N_ITERATIONS):
        weight_N = probability[inverse_N]
        weight_N /= np.bincount(token_N, weight_N)[token_N]
        count = np.bincount(inverse_N, weight_N)
        probability = count / np.bincount(entry_source, count)[entry_source]
    weight_N, start, positions = probability[inverse_N], 0, []
    for source, target in pairs:
        n = len(source) * len(target)
        weight_TS = weight_N[start : start + n].reshape(len(target), len(source))
        positions.append(weight_TS.argmax(1).tolist() if n else [])
        start += n
    return positions


def _all_links(pairs: Sequence[Pair]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Links of every source token with every target token of its pair.

    Returns the ids of both, and the index of the target token among all target tokens of all pairs.
    """
    source = [np.tile(np.asarray(s, np.int64), len(t)) for s, t in pairs]
    target = [np.repeat(np.asarray(t, np.int64), len(s)) for s, t in pairs]
    first = np.cumsum([0, *[len(t) for _, t in pairs]])
    token = [np.repeat(np.arange(len(t)) + n, len(s)) for (s, t), n in zip(pairs, first, strict=False)]
    empty = [np.empty(0, np.int64)]  # np.concatenate needs at least one array
    return np.concatenate([*source, *empty]), np.concatenate([*target, *empty]), np.concatenate([*token, *empty])


@torch.no_grad()
def choose_heads(model: Transformer, pairs: Sequence[Pair], device: torch.device | str) -> AlignmentHeads | None:
    """The layer, and the heads of it, whose attention agrees best with the lexical links. None if there are no links.

    The heads of each layer are ranked by how often each of them alone is right. Then the sum of the best one, of the
    best two, ... is compared.
    """
    n_links = np.cumsum([len(source) * len(target) for source, target in pairs])
    pairs = pairs[: min(MAX_PAIRS, max(1, int(np.searchsorted(n_links, MAX_LINKS))))]
    links = lexical_links(pairs)
    linked = [(pair, link) for pair, link in zip(pairs, links, strict=True) if link][:MAX_COMPARED_PAIRS]
    if not linked:
        return None
    attention = _attention_of_links(model, linked, device)
    ranking_XLH = (-_n_right(attention)).argsort(axis=-1, kind="stable")
    sums = [
        (np.take_along_axis(weight_XLHNS, ranking_XLH[..., None, None], axis=2).cumsum(axis=2), source_N)
        for weight_XLHNS, source_N in attention
    ]
    n_right_XLH = _n_right(sums)
    shift, layer, n_more = (int(i) for i in np.unravel_index(n_right_XLH.argmax(), n_right_XLH.shape))
    heads = tuple(sorted(ranking_XLH[shift, layer][: n_more + 1].tolist()))
    return AlignmentHeads(layer=layer, heads=heads, shift=shift)


def _attention_of_links(
    model: Transformer, linked: Sequence[tuple[Pair, list[Link]]], device: torch.device | str
) -> list[LinkedAttention]:
    was_training = model.training
    model.eval()
    attention: list[LinkedAttention] = []
    for first in range(0, len(linked), BATCH):
        if sum(weight_XLHNS.size for weight_XLHNS, _ in attention) > MAX_WEIGHTS:
            break
        batch = linked[first : first + BATCH]
        weight_LBHTS = memory_attention(model, [pair for pair, _ in batch], device).float().cpu().numpy()
        for b, (pair, link) in enumerate(batch):
            source_N, target_N = np.array(link).T
            n_source = len(pair[0]) + 1
            shifts = [weight_LBHTS[:, b, :, target_N + shift, :n_source].transpose(1, 2, 0, 3) for shift in (0, 1)]
            attention.append((np.stack(shifts), source_N))
    model.train(was_training)
    return attention


def _n_right(attention: Sequence[LinkedAttention]) -> NDArray[np.int64]:
    """For each shift, layer and head: the number of links whose source position has the highest weight."""
    return np.asarray(sum((weight_XLHNS.argmax(-1) == source_N).sum(-1) for weight_XLHNS, source_N in attention))


def memory_attention(model: Transformer, pairs: Sequence[Pair], device: torch.device | str) -> Tensor:
    """weight_LBHTS of one pass with the given targets. Position 0 of T is the start mark, which predicts token 0."""
    batch = make_batch(pairs, model.config)
    source_BS, target_in_BT = (torch.from_numpy(ids).to(device) for ids in batch[:2])
    output: Output = model(source_BS, target_in_BT, with_attention=True)
    assert output.attention is not None
    return output.attention.memory_LBHTS


def words_of(pieces: Sequence[str]) -> list[int | None]:
    """The index of the word that each piece belongs to. Spaces separate words. None for pieces of spaces alone."""
    words: list[int | None] = []
    word, is_new = -1, True
    for piece in pieces:
        text = " " if piece == "<0x09>" else piece.replace(SPACE_MARK, " ")
        is_new = is_new or text.startswith(" ")
        if text.strip(" "):
            word += is_new
            is_new = text.endswith(" ")
            words.append(word)
        else:
            words.append(None)
    return words


def n_words(words: Sequence[int | None]) -> int:
    return max((word for word in words if word is not None), default=-1) + 1


def word_links(weight_TS: Tensor, source_words: Sequence[int | None], target_words: Sequence[int | None]) -> list[Link]:
    """For each target word, the source word with the highest weight; no link if the end mark has the highest weight.

    weight_TS has a row for each target piece, a column for each source piece, and a last column for the end mark.
    """
    n_source = n_words(source_words)
    weight = np.zeros((n_words(target_words), n_source + 1))
    columns = [n_source if word is None else word for word in (*source_words, None)]
    for row, word in zip(weight_TS.double().numpy(), target_words, strict=True):
        if word is not None:
            np.add.at(weight[word], columns, row)
    return [(int(s), t) for t, s in enumerate(weight.argmax(1)) if s < n_source]


def error_rate(links: Sequence[set[Link]], sure: Sequence[set[Link]], possible: Sequence[set[Link]]) -> float:
    """Alignment error rate (AER, Och and Ney 2003) over all sentences. 0 is best. Sure links are possible links too."""
    n_links = sum(map(len, links))
    n_sure = sum(map(len, sure))
    n_right = sum(len(a & s) + len(a & (s | p)) for a, s, p in zip(links, sure, possible, strict=True))
    return 1.0 - n_right / (n_links + n_sure) if n_links + n_sure else 0.0
