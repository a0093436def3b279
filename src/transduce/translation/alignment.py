"""Word alignment from attention to the memory: which heads to ask, and what they say.

Which layer and heads align best is found on data, without anybody's annotation: they are compared with links that
two lexical models (Brown et al. 1993, model 1), one for each direction, agree on.
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
"""Ids of source and target, without marks."""
Link = tuple[int, int]
"""Source and target word, counted from 0."""

N_ITERATIONS = 5
MOST_PAIRS, MOST_LINKS = 10_000, 3_000_000
"""To learn the lexical models from, in a second or two and some 200 MB."""
MOST_JUDGED, MOST_WEIGHTS = 300, 20_000_000
"""Pairs to compare heads on, fewer where they are long: 80 MB."""
BATCH = 16


def lexical_links(pairs: Sequence[Pair]) -> list[list[Link]]:
    """For each pair, the links that model 1 finds in both directions."""
    forward = _best_links(pairs)
    backward = _best_links([(target, source) for source, target in pairs])
    return [
        sorted({(s, t) for t, s in enumerate(of_target)} & {(s, t) for s, t in enumerate(of_source)})
        for of_target, of_source in zip(forward, backward, strict=True)
    ]


def _best_links(pairs: Sequence[Pair]) -> list[list[int]]:
    """For each target token, the source position that model 1 holds most likely."""
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
    weight_N, start, found = probability[inverse_N], 0, []
    for source, target in pairs:
        n = len(source) * len(target)
        found.append(weight_N[start : start + n].reshape(len(target), len(source)).argmax(1).tolist() if n else [])
        start += n
    return found


def _all_links(pairs: Sequence[Pair]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of every source with every target token of its pair: their ids, and which target token it is among all."""
    source = [np.tile(np.asarray(s, np.int64), len(t)) for s, t in pairs]
    target = [np.repeat(np.asarray(t, np.int64), len(s)) for s, t in pairs]
    first = np.cumsum([0, *[len(t) for _, t in pairs]])
    token = [np.repeat(np.arange(len(t)) + n, len(s)) for (s, t), n in zip(pairs, first, strict=False)]
    none = [np.empty(0, np.int64)]
    return np.concatenate([*source, *none]), np.concatenate([*target, *none]), np.concatenate([*token, *none])


@torch.no_grad()
def choose_heads(model: Transformer, pairs: Sequence[Pair], device: torch.device | str) -> AlignmentHeads | None:
    """The layer, and its heads, whose attention agrees most with the lexical links. None where nothing can be said."""
    n_links = np.cumsum([len(source) * len(target) for source, target in pairs])
    pairs = pairs[: min(MOST_PAIRS, max(1, int(np.searchsorted(n_links, MOST_LINKS))))]
    links = lexical_links(pairs)
    judged = [(pair, link) for pair, link in zip(pairs, links, strict=True) if link][:MOST_JUDGED]
    if not judged:
        return None
    was_training = model.training
    model.eval()
    found: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []
    for first in range(0, len(judged), BATCH):
        if sum(weight_XLHNS.size for weight_XLHNS, _ in found) > MOST_WEIGHTS:
            break
        some = judged[first : first + BATCH]
        weight_LBHTS = memory_attention(model, [pair for pair, _ in some], device).float().cpu().numpy()
        for b, (pair, link) in enumerate(some):
            source_N, target_N = np.array(link).T
            n_source = len(pair[0]) + 1
            shifts = [weight_LBHTS[:, b, :, target_N + shift, :n_source].transpose(1, 2, 0, 3) for shift in (0, 1)]
            found.append((np.stack(shifts), source_N))
    model.train(was_training)
    # By how often each head alone is right the heads of a layer are ranked; then the first two, three, … are tried.
    ranking_XLH = (-_n_right(found)).argsort(axis=-1, kind="stable")
    ranked = [
        (np.take_along_axis(weight_XLHNS, ranking_XLH[..., None, None], axis=2).cumsum(axis=2), source_N)
        for weight_XLHNS, source_N in found
    ]
    n_right_XLH = _n_right(ranked)
    shift, layer, n_more = (int(i) for i in np.unravel_index(n_right_XLH.argmax(), n_right_XLH.shape))
    heads = tuple(sorted(ranking_XLH[shift, layer][: n_more + 1].tolist()))
    return AlignmentHeads(layer=layer, heads=heads, shift=shift)


def _n_right(found: Sequence[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """How often the most is where it should be."""
    return np.asarray(sum((weight_XLHNS.argmax(-1) == source_N).sum(-1) for weight_XLHNS, source_N in found))


def memory_attention(model: Transformer, pairs: Sequence[Pair], device: torch.device | str) -> Tensor:
    """weight_LBHTS, forced along the targets. Place 0 of T is where the first target token is asked for."""
    batch = make_batch(pairs, model.config)
    source_BS, target_in_BT = (torch.from_numpy(ids).to(device) for ids in batch[:2])
    output: Output = model(source_BS, target_in_BT, with_attention=True)
    assert output.attention is not None
    return output.attention.memory_LBHTS


def words_of(pieces: Sequence[str]) -> list[int | None]:
    """To which word, as spaces divide the text, each piece belongs. None for one of spaces alone."""
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
    """For each target word the source word that it looks at most; none where it looks most at the end of the text.

    weight_TS has a row for each target piece, and a column for each source piece and one for the end mark.
    """
    n_source = n_words(source_words)
    weight = np.zeros((n_words(target_words), n_source + 1))
    columns = [n_source if word is None else word for word in (*source_words, None)]
    for row, word in zip(weight_TS.double().numpy(), target_words, strict=True):
        if word is not None:
            np.add.at(weight[word], columns, row)
    return [(int(s), t) for t, s in enumerate(weight.argmax(1)) if s < n_source]


def error_rate(found: Sequence[set[Link]], sure: Sequence[set[Link]], possible: Sequence[set[Link]]) -> float:
    """AER (Och and Ney 2003) over all sentences: 0 is best. What is sure is possible too."""
    n_found = sum(map(len, found))
    n_sure = sum(map(len, sure))
    n_right = sum(len(a & s) + len(a & (s | p)) for a, s, p in zip(found, sure, possible, strict=True))
    return 1.0 - n_right / (n_found + n_sure) if n_found + n_sure else 0.0
