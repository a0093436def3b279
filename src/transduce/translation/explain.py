"""One more pass, forced along a translation: how likely each token was, what else could follow, who looked at what."""

# Axes: B sentences, T target positions, S source positions, V vocabulary, C candidates, L layers, H heads.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.data.batches import make_batch
from transduce.data.subword import Subwords
from transduce.model import Output, Transformer
from transduce.model_folder.format import AlignmentHeads
from transduce.search.hypotheses import Hypothesis
from transduce.translation.alignment import Link, word_links, words_of

N_RUNNERS_UP = 3
MOST_AT_ONCE = 8
"""Parts of a line in one pass: all their probabilities and attention weights are held at once."""


class Token(NamedTuple):
    piece: str
    probability: float
    runners_up: list[tuple[str, float]]
    """What else the model thought of at this place, the likeliest first."""


class Weights(NamedTuple):
    """Attention weights of one sentence, without padding. Rows ask, columns are looked at."""

    encoder_LHSS: Tensor
    decoder_LHTT: Tensor
    memory_LHTS: Tensor


@dataclass(frozen=True)
class Explained:
    source: list[int]
    """With the tag before it and the end mark."""
    target_in: list[int]
    """With the start mark."""
    tokens: list[Token]
    """Token t was said by position t of `target_in`. The end mark is one, where there is one."""
    weights: Weights
    source_words: list[int | None]
    target_words: list[int | None]
    """To which word each piece belongs, marks and tag left out."""
    links: list[Link] | None
    """None where the model does not say which heads align words."""


@torch.no_grad()
def explain(
    model: Transformer,
    subwords: Subwords,
    parts: Sequence[tuple[list[int], Hypothesis]],
    tag: list[int],
    heads: AlignmentHeads | None,
) -> Iterator[Explained]:
    """Of each (source, what was said of it). `tag`: what stood before every source."""
    device = next(model.parameters()).device
    for first in range(0, len(parts), MOST_AT_ONCE):
        some = parts[first : first + MOST_AT_ONCE]
        batch = make_batch([([*tag, *source], hypothesis.ids) for source, hypothesis in some], model.config)
        source_BS, target_in_BT = (torch.from_numpy(ids).to(device) for ids in batch[:2])
        output: Output = model(source_BS, target_in_BT, with_attention=True)
        assert output.attention is not None
        for b, (source, hypothesis) in enumerate(some):
            n_source, n_target = len(tag) + len(source) + 1, len(hypothesis.ids) + 1
            encoder_LHSS, decoder_LHTT, memory_LHTS = (kind[:, b].float().cpu() for kind in output.attention)
            weights = Weights(
                encoder_LHSS[:, :, :n_source, :n_source],
                decoder_LHTT[:, :, :n_target, :n_target],
                memory_LHTS[:, :, :n_target, :n_source],
            )
            source_words, target_words = (words_of(subwords.pieces(side)) for side in (source, hypothesis.ids))
            links = None
            if heads is not None:
                weight_TS = _weights_of(heads, weights, len(hypothesis.ids))[:, len(tag) :]
                links = word_links(weight_TS, source_words, target_words)
            yield Explained(
                source=source_BS[b, :n_source].tolist(),
                target_in=target_in_BT[b, :n_target].tolist(),
                tokens=_tokens(output.logits_BTV[b], subwords, hypothesis, model.config.eos_id),
                weights=weights,
                source_words=source_words,
                target_words=target_words,
                links=links,
            )


def _tokens(logits_TV: Tensor, subwords: Subwords, hypothesis: Hypothesis, eos_id: int) -> list[Token]:
    ids = [*hypothesis.ids, *([eos_id] if hypothesis.has_ended else [])]
    probability_TV = logits_TV[: len(ids)].float().softmax(-1).cpu()
    best_TC = probability_TV.topk(N_RUNNERS_UP + 1)
    tokens = []
    for place, i in enumerate(ids):
        likely = zip(best_TC.indices[place].tolist(), best_TC.values[place].tolist(), strict=True)
        others = [(subwords.pieces([other])[0], value) for other, value in likely if other != i]
        tokens.append(Token(subwords.pieces([i])[0], float(probability_TV[place, i]), others[:N_RUNNERS_UP]))
    return tokens


def _weights_of(heads: AlignmentHeads, weights: Weights, n_pieces: int) -> Tensor:
    """How those that align look at the source when each piece of the translation is asked for, or known."""
    weight_HTS = weights.memory_LHTS[heads.layer, list(heads.heads)]
    return weight_HTS.mean(0)[heads.shift :][:n_pieces]
