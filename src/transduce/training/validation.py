"""How good the model is on the validation sentences: loss and accuracy, and BLEU of greedy translations."""

# Axes: B sentences, S source positions, T target positions, V vocabulary.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce.config import ModelConfig, RunConfig
from transduce.data.batches import Examples, steps
from transduce.data.plan import Layout
from transduce.data.prepare import Prepared
from transduce.data.subword import Subwords
from transduce.evaluation.metrics import bleu
from transduce.model import Transformer
from transduce.model_folder.format import Origin
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.journal import TranslationScore
from transduce.training.passes.written import MAX_WORKERS
from transduce.training.recipe import loss
from transduce.training.share import Part, split_rows
from transduce.translation.alignment import memory_attention
from transduce.translation.translator import Translator

MAX_EXTRA_TOKENS, N_SAMPLES = 10, 3
"""For translations: how much longer than the source they may get, and how many of them are logged."""
MAX_ATTENTION_TOKENS = 60
"""Of each side of a logged translation, so that the log stays small."""
END = "</s>"

CPU_POSITIONS = 1024

ScoreTranslations = Callable[[Transformer, int], TranslationScore]
"""Translates the given number of validation sentences."""


class ValidationScore(NamedTuple):
    loss: float
    """Per token, without label smoothing."""
    accuracy: float
    """The share of tokens for which the most likely token is the right one, given all right tokens before it."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Validation:
    """`layout` is None if there are no validation examples."""

    def __init__(
        self,
        model: Transformer,
        config: ModelConfig,
        choices: Choices,
        examples: Examples,
        layout: Layout | None,
        score_translations: ScoreTranslations | None,
    ) -> None:
        self.model, self.config, self.choices = model, config, choices
        self.examples, self.layout, self._score_translations = examples, layout, score_translations
        self.n_target_tokens = int(examples.lengths()[1].sum()) if layout is not None else 0

    def loss(self, group: Group, micro_limit: int | None) -> ValidationScore | None:
        """`micro_limit`: the most positions of one pass, None for no limit."""
        if self.layout is None:
            return None
        self.model.eval()
        total_3 = torch.zeros(3, dtype=torch.float64, device=group.device)
        with self._map_parts(group.device) as map_parts:
            order = steps(self.examples, self.layout, self.config, 0, group.rank, group.n_ranks)
            for _, step in zip(range(self.layout.n_steps), order, strict=False):
                batches = ([torch.from_numpy(ids) for ids in batch[:3]] for batch in step.batches)
                parts = [part for batch in batches for part in split_rows(batch, self._limit(group, micro_limit))]
                for total_of_part_3 in map_parts(partial(self._total, group.device), parts):
                    total_3 += total_of_part_3
        self.model.train()
        group.sum([total_3])
        loss_sum, n_right, n_tokens = total_3.tolist()
        return ValidationScore(loss_sum / n_tokens, n_right / n_tokens)

    @contextlib.contextmanager
    def _map_parts(self, device: torch.device) -> Iterator[Callable[..., Iterable[Tensor]]]:
        """On a CPU each part has a thread, as in training. Threads inside each operation would wait for each other
        hundreds of times, and on a busy machine for minutes."""
        if device.type == "cuda":
            yield map
            return
        n_workers = min(self.choices.n_threads, MAX_WORKERS)
        n_inner = self.choices.n_threads // n_workers
        with ThreadPoolExecutor(n_workers, "validation", torch.set_num_threads, (n_inner,)) as pool:
            yield pool.map

    def _limit(self, group: Group, micro_limit: int | None) -> int | None:
        """The most positions of one pass. On a CPU there must be enough passes for all threads."""
        if group.device.type == "cuda":
            return micro_limit
        return min(CPU_POSITIONS, micro_limit or CPU_POSITIONS)

    @torch.no_grad()
    def _total(self, device: torch.device, part: Part) -> Tensor:
        """The sum of the loss, the number of right tokens and the number of tokens."""
        pad_id = self.config.pad_id
        source_BS, target_in_BT, target_out_BT = (ids.to(device) for ids in part)
        with self.choices.autocast():
            logits_BTV = self.model(source_BS, target_in_BT).logits_BTV
        loss_sum, n_tokens = loss(logits_BTV, target_out_BT, 0.0, pad_id)
        is_right_BT = (logits_BTV.argmax(-1) == target_out_BT) & (target_out_BT != pad_id)
        return torch.stack([loss_sum.double(), is_right_BT.sum().double(), n_tokens.double()])

    def translations(self, group: Group, n: int) -> TranslationScore | None:
        """Scores `n` translations, on the first rank alone; the other ranks wait for it at the next step."""
        if n == 0 or self.layout is None or self._score_translations is None or not group.is_first:
            return None
        self.model.eval()
        # On a CPU the translator chooses its precision itself.
        autocast = self.choices.autocast() if group.device.type == "cuda" else contextlib.nullcontext()
        with autocast, self.choices.all_threads():
            score = self._score_translations(self.model, n)
        self.model.train()
        return score


def translation_scorer(prepared: Prepared, config: RunConfig) -> ScoreTranslations:
    """Computes BLEU of greedy translations of validation sentences, spread evenly over all of them."""
    languages: dict[tuple[int, ...], str] = {
        (prepared.subwords.tag(name),): name for name in prepared.report.tagged_languages
    }
    # Few extra tokens: a model that has learnt little never ends a sentence, so the first validations would be slow.
    settings = replace(config.decode, method="beam", beam_size=1, n_best=1, max_extra_tokens=MAX_EXTRA_TOKENS)
    origin = origin_of(prepared)

    def score_translations(model: Transformer, n: int) -> TranslationScore:
        rows = [int(row) for row in np.linspace(0, len(prepared.valid) - 1, min(n, len(prepared.valid)))]
        pairs = [prepared.valid.pair(row) for row in rows]
        sources, references = (prepared.subwords.decode([pair[side].tolist() for pair in pairs]) for side in (0, 1))
        target_languages = [languages.get(tuple(prepared.valid.tag(row))) for row in rows]
        translator = Translator(model, config, prepared.subwords, origin, settings=settings)
        texts = [""] * len(rows)
        for language in dict.fromkeys(target_languages):
            places = [place for place, name in enumerate(target_languages) if name == language]
            translations = translator.translate([sources[place] for place in places], language)
            for place, translation in zip(places, translations, strict=True):
                texts[place] = translation.text
        score = bleu(texts, references, n_bootstrap=0)
        samples = []
        for i in list(range(0, len(rows), max(1, len(rows) // N_SAMPLES)))[:N_SAMPLES]:
            sample = {"source": sources[i], "reference": references[i], "translation": texts[i]}
            tag = prepared.valid.tag(rows[i])
            samples.append(sample | {"attention": attention_of(model, prepared.subwords, tag, sources[i], texts[i])})
        return TranslationScore(bleu=score.value, bleu_signature=score.signature, samples=samples)

    return score_translations


@torch.no_grad()
def attention_of(model: Transformer, subwords: Subwords, tag: list[int], source: str, text: str) -> dict[str, Any]:
    """How much each token of a translation attends to each source token, as the mean of all heads of all layers."""
    source_ids, target_ids = (ids[:MAX_ATTENTION_TOKENS] for ids in subwords.encode([source, text]))
    weight_LBHTS = memory_attention(model, [([*tag, *source_ids], target_ids)], next(model.parameters()).device)
    weight_TS = weight_LBHTS.float().mean(dim=(0, 1, 2))
    rows = [[round(weight, 3) for weight in row] for row in weight_TS.tolist()]
    pieces = [*subwords.pieces([*tag, *source_ids]), END], [*subwords.pieces(target_ids), END]
    return {"source": pieces[0], "target": pieces[1], "weights": rows}


def origin_of(prepared: Prepared) -> Origin:
    source_N, target_N = prepared.train.lengths()
    return Origin(
        directions=tuple(prepared.report.directions()),
        tagged_languages=tuple(prepared.report.tagged_languages),
        longest_source=int(source_N.max()),
        longest_target=int(target_N.max()),
    )
