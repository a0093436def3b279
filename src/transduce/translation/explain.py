"""Details of a translation, from one more pass over it: probabilities of its tokens and alternatives, attention."""

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
BATCH = 8
"""Parts of a line in one pass. All their probabilities and attention weights are in memory at the same time."""


class Token(NamedTuple):
    """A token of a translation, with its probability and the most probable other tokens at its position."""

    piece: str
    probability: float
    runners_up: list[tuple[str, float]]
    """Pieces and probabilities, the most probable first."""


class Weights(NamedTuple):
    """Attention weights of one sentence, without padding. Rows are queries, columns are attended positions."""

    encoder_LHSS: Tensor
    decoder_LHTT: Tensor
    memory_LHTS: Tensor


@dataclass(frozen=True)
class Explained:
    """The details of one part of a line."""

    source: list[int]
    """Token ids, including the language tag and the end mark."""
    target_in: list[int]
    """Token ids, including the start mark."""
    tokens: list[Token]
    """Position t of `target_in` predicts token t. The end mark is included, unless the translation was cut."""
    weights: Weights
    source_words: list[int | None]
    target_words: list[int | None]
    """The index of the word that each piece belongs to, without marks and tag."""
    links: list[Link] | None
    """None if the model folder does not name heads that align words."""


@torch.no_grad()
def explain(
    model: Transformer,
    subwords: Subwords,
    parts: Sequence[tuple[list[int], Hypothesis]],
    tag: list[int],
    heads: AlignmentHeads | None,
) -> Iterator[Explained]:
    """Explains each part: a source and its translation. `tag`: token ids of the language tag before every source."""
    device = next(model.parameters()).device
    for first in range(0, len(parts), BATCH):
        batch_parts = parts[first : first + BATCH]
        batch = make_batch([([*tag, *source], hypothesis.ids) for source, hypothesis in batch_parts], model.config)
        source_BS, target_in_BT = (torch.from_numpy(ids).to(device) for ids in batch[:2])
        output: Output = model(source_BS, target_in_BT, with_attention=True)
        assert output.attention is not None
        for b, (source, hypothesis) in enumerate(batch_parts):
            n_source, n_target = len(tag) + len(source) + 1, len(hypothesis.ids) + 1
            encoder_LHSS, decoder_LHTT, memory_LHTS = (weight[:, b].float().cpu() for weight in output.attention)
            weights = Weights(
                encoder_LHSS[:, :, :n_source, :n_source],
                decoder_LHTT[:, :, :n_target, :n_target],
                memory_LHTS[:, :, :n_target, :n_source],
            )
            source_words, target_words = (words_of(subwords.pieces(side)) for side in (source, hypothesis.ids))
            links = None
            if heads is not None:
                weight_TS = _alignment_weights(heads, weights, len(hypothesis.ids))[:, len(tag) :]
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
    for t, token_id in enumerate(ids):
        best = zip(best_TC.indices[t].tolist(), best_TC.values[t].tolist(), strict=True)
        runners_up = [(subwords.pieces([i])[0], probability) for i, probability in best if i != token_id]
        piece, probability = subwords.pieces([token_id])[0], float(probability_TV[t, token_id])
        tokens.append(Token(piece, probability, runners_up[:N_RUNNERS_UP]))
    return tokens


def _alignment_weights(heads: AlignmentHeads, weights: Weights, n_pieces: int) -> Tensor:
    """The mean weights of the alignment heads, with a row for each piece of the translation.

    With shift 0, the row of a piece is the position that predicts it; with shift 1, the position that reads it.
    """
    weight_HTS = weights.memory_LHTS[heads.layer, list(heads.heads)]
    return weight_HTS.mean(0)[heads.shift :][:n_pieces]
