"""The hypotheses of all sentences in a search, in a few tensors."""

# Axes: B sentences, K hypotheses of each, T tokens.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import DecodeConfig

NONE = -1
"""Marks a place without a token."""


class Sentence(NamedTuple):
    """One sentence to translate."""

    number: int
    """Its number among all sentences. With the seed it determines what sampling draws."""
    source: Sequence[int]
    """Token ids, end mark included."""
    prefix: Sequence[int] = ()
    """The first tokens of the translation, which are forced."""


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]
    """Token ids, without the end mark."""
    log_prob: float
    """Log-probability under the model, summed over all tokens, end mark included."""
    score: float
    """`log_prob` divided by the length penalty. Hypotheses are ranked by it."""
    has_ended: bool
    """False if it was cut at the limit."""
    margin: float
    """The smallest difference in log-probability that decided any choice in the search for it."""


def length_penalty(length: Tensor, settings: DecodeConfig) -> Tensor:
    """The divisor of a log-probability. The end mark counts as a token."""
    length = length.to(torch.float32)
    if settings.length_penalty == "gnmt":  # Wu et al. 2016, equation 14
        return ((5 + length) / 6) ** settings.length_alpha
    return length**settings.length_alpha


@dataclass(frozen=True)
class Beams:
    """Live and ended hypotheses. Each ended hypothesis leaves one place fewer for live ones."""

    number_B: Tensor
    length_B: Tensor
    """Number of tokens: all live hypotheses of a sentence have the same length."""
    limit_B: Tensor
    forced_BT: Tensor
    """The forced prefix of each translation."""
    margin_B: Tensor
    n_ended_B: Tensor
    token_BKT: Tensor
    last_BK: Tensor
    """The last token of each hypothesis. Places without a live hypothesis hold any token; their result is ignored."""
    log_prob_BK: Tensor
    """-inf for places without a live hypothesis."""
    state_BK: Tensor
    """The state of the rules' automaton."""
    ended_token_BKT: Tensor
    ended_log_prob_BK: Tensor
    ended_score_BK: Tensor
    ended_length_BK: Tensor

    @classmethod
    def start(
        cls,
        sentences: Sequence[Sentence],
        settings: DecodeConfig,
        limits: Sequence[int],
        bos_id: int,
        device: torch.device,
    ) -> Beams:
        n, n_kept, longest = len(sentences), settings.n_hypotheses, max(limits)
        n_forced = max(len(sentence.prefix) for sentence in sentences)
        forced = [[*sentence.prefix, *[NONE] * (n_forced - len(sentence.prefix))] for sentence in sentences]
        log_prob_BK = torch.zeros(n, n_kept, device=device)
        if settings.method == "beam":
            log_prob_BK[:, 1:] = -torch.inf  # before the first token all rows are equal

        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, device=device)

        def no_scores() -> Tensor:
            return torch.full((n, n_kept), -torch.inf, device=device)

        return cls(
            number_B=torch.tensor([sentence.number for sentence in sentences], device=device),
            length_B=integers(n),
            limit_B=torch.tensor(limits, device=device),
            forced_BT=torch.tensor(forced, dtype=torch.long, device=device).view(n, n_forced),
            margin_B=torch.full((n,), torch.inf, device=device),
            n_ended_B=integers(n),
            token_BKT=integers(n, n_kept, longest, value=NONE),
            last_BK=integers(n, n_kept, value=bos_id),
            log_prob_BK=log_prob_BK,
            state_BK=integers(n, n_kept),
            ended_token_BKT=integers(n, n_kept, longest, value=NONE),
            ended_log_prob_BK=no_scores(),
            ended_score_BK=no_scores(),
            ended_length_BK=integers(n, n_kept),
        )

    def select(self, sentences_B: Tensor) -> Beams:
        """Only these sentences, cut to the width that they need."""
        kept = {f.name: getattr(self, f.name)[sentences_B] for f in fields(self)}
        n = int(kept["limit_B"].max()) if len(sentences_B) else 0
        for name in ("token_BKT", "ended_token_BKT"):
            kept[name] = kept[name][..., :n]
        return Beams(**kept)

    def join(self, other: Beams) -> Beams:
        wide, other = self._as_wide_as(other), other._as_wide_as(self)
        return Beams(**{f.name: torch.cat([getattr(wide, f.name), getattr(other, f.name)]) for f in fields(self)})

    def put(self, places: Tensor, other: Beams) -> Beams:
        """Replaces the sentences at these places by the other's, in order. Copies nothing else."""
        wide, other = self._as_wide_as(other), other._as_wide_as(self)
        for f in fields(self):
            field = getattr(wide, f.name)
            field.index_copy_(0, places, getattr(other, f.name).to(field.dtype))  # a stepper may use float64
        return wide

    def _as_wide_as(self, other: Beams) -> Beams:
        """With room for as many tokens as the other."""
        widths = {name: getattr(other, name).shape[-1] for name in ("forced_BT", "token_BKT", "ended_token_BKT")}
        more = {name: n - getattr(self, name).shape[-1] for name, n in widths.items()}
        wider = {name: F.pad(getattr(self, name), (0, n), value=NONE) for name, n in more.items() if n > 0}
        return replace(self, **wider) if wider else self

    def without_used_prefix(self) -> Beams:
        """Drops the forced prefix once every sentence is past it."""
        if (n := self.forced_BT.shape[1]) == 0:
            return self
        T = torch.arange(n, device=self.forced_BT.device)
        is_left = ((self.forced_BT != NONE) & (self.length_B[:, None] <= T)).any()
        return self if bool(is_left) else replace(self, forced_BT=self.forced_BT[:, :0])

    def place_BK1(self, length_B: Tensor) -> Tensor:
        """The index of the next token. A finished sentence may be past its limit; its tokens there are ignored."""
        n_kept, n = self.token_BKT.shape[1:]
        return length_B.clamp(0, max(n - 1, 0))[:, None, None].expand(-1, n_kept, 1)

    def is_over_B(self, settings: DecodeConfig) -> Tensor:
        """Whether continuing the search cannot change its result."""
        best_log_prob_B = self.log_prob_BK.max(1).values
        is_over_B = (best_log_prob_B == -torch.inf) | (self.length_B >= self.limit_B)
        if settings.method == "beam" and settings.stop_early:
            # A log-probability only falls, and the penalty is largest at the limit.
            bound_B = best_log_prob_B / length_penalty(self.limit_B, settings)
            worst_B = self.ended_score_BK.topk(settings.n_best).values[:, -1]
            is_over_B = is_over_B | (worst_B >= bound_B)
        return is_over_B


def harvest(beams: Beams, sentences: Sequence[int], settings: DecodeConfig) -> list[list[Hypothesis]]:
    """The hypotheses of each of these sentences, the best first. Those cut at the limit come after those that ended.

    If the rules allowed no token at all, the result is one empty hypothesis that has not ended.
    """
    results = []
    columns = to_numpy(
        [
            beams.margin_B,
            beams.n_ended_B,
            beams.ended_token_BKT,
            beams.ended_log_prob_BK,
            beams.ended_score_BK,
            beams.ended_length_BK,
            beams.token_BKT,
            beams.log_prob_BK,
            beams.length_B,
        ],
        sentences,
    )
    for margins, n_ended, tokens, log_probs, scores, lengths, live, live_log_probs, length in zip(
        *columns, strict=True
    ):
        margin, order = float(margins), sorted(range(int(n_ended)), key=lambda i: -scores[i])
        if len(order) > 1:  # the choice between ended hypotheses may be the closest one
            margin = min(margin, float(scores[order[0]]) - float(scores[order[1]]))
        ended = [
            Hypothesis(tokens[i, : lengths[i] - 1].tolist(), float(log_probs[i]), float(scores[i]), True, margin)
            for i in order[: settings.n_best]
        ]
        cut = []
        if len(ended) < settings.n_best:
            penalty = length_penalty(torch.tensor([max(1, int(length))]), settings)
            live_scores = (torch.from_numpy(live_log_probs) / penalty).tolist()
            cut = [
                Hypothesis(live[i, :length].tolist(), float(live_log_probs[i]), live_scores[i], False, float(margins))
                for i in sorted(range(len(live)), key=lambda i: -live_scores[i])
                if live_log_probs[i] > -torch.inf
            ]
        nothing = Hypothesis([], -math.inf, -math.inf, False, margin)
        results.append(([*ended, *cut] or [nothing])[: settings.n_best])
    return results


def to_numpy(tensors: Sequence[Tensor], sentences: Sequence[int]) -> list[list[Any]]:
    """The rows of some sentences as NumPy arrays, which are faster than tensors for small work. From a GPU there is one
    copy per dtype, because each copy waits for the device."""
    if tensors[0].device.type == "cpu":
        return [[array[i] for i in sentences] for array in (tensor.numpy() for tensor in tensors)]
    sentences_B = torch.tensor(sentences, device=tensors[0].device)
    tensors = [tensor[sentences_B] for tensor in tensors]
    results = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        together = torch.cat([tensors[i].flatten() for i in places]).cpu()
        for i, part in zip(places, together.split([tensors[i].numel() for i in places]), strict=True):
            results[i] = part.view(tensors[i].shape)
    return [list(tensor.numpy()) for tensor in results]
