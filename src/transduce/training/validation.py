"""How good the model is on the validation sentences: loss and accuracy, and BLEU of greedy translations."""

# Axes: B sentences, S source positions, T target positions, V vocabulary.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from transduce.config import ModelConfig, RunConfig
from transduce.data.batches import Examples, steps
from transduce.data.plan import Layout
from transduce.data.prepare import Prepared
from transduce.evaluation.metrics import bleu
from transduce.model import Transformer
from transduce.model_folder.format import Origin
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.journal import TranslationScore
from transduce.training.recipe import loss
from transduce.training.share import split_rows
from transduce.translation.translator import Translator

MAX_EXTRA_TOKENS, N_SAMPLES = 10, 3
"""For translations: how much longer than the source they may get, and how many of them are logged."""

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

    def loss(self, group: Group, micro_limit: int | None) -> ValidationScore | None:
        """`micro_limit`: the most positions of one pass, None for no limit."""
        if self.layout is None:
            return None
        self.model.eval()
        with self.choices.all_threads(), torch.no_grad():
            score = self._loss(self.layout, group, micro_limit)
        self.model.train()
        return score

    def _loss(self, layout: Layout, group: Group, micro_limit: int | None) -> ValidationScore:
        pad_id = self.config.pad_id
        total_3 = torch.zeros(3, dtype=torch.float64, device=group.device)
        order = steps(self.examples, layout, self.config, 0, group.rank, group.n_ranks)
        for _, step in zip(range(layout.n_steps), order, strict=False):
            for batch in step.batches:
                for part in split_rows([torch.from_numpy(ids) for ids in batch[:3]], micro_limit):
                    source_BS, target_in_BT, target_out_BT = (ids.to(group.device) for ids in part)
                    with self.choices.autocast():
                        logits_BTV = self.model(source_BS, target_in_BT).logits_BTV
                    loss_sum, n_tokens = loss(logits_BTV, target_out_BT, 0.0, pad_id)
                    is_right_BT = (logits_BTV.argmax(-1) == target_out_BT) & (target_out_BT != pad_id)
                    total_3 += torch.stack([loss_sum.double(), is_right_BT.sum().double(), n_tokens.double()])
        group.sum([total_3])
        loss_sum, n_right, n_tokens = total_3.tolist()
        return ValidationScore(loss_sum / n_tokens, n_right / n_tokens)

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
        sampled = list(range(0, len(rows), max(1, len(rows) // N_SAMPLES)))[:N_SAMPLES]
        samples = [{"source": sources[i], "reference": references[i], "translation": texts[i]} for i in sampled]
        return TranslationScore(bleu=score.value, bleu_signature=score.signature, samples=samples)

    return score_translations


def origin_of(prepared: Prepared) -> Origin:
    source_N, target_N = prepared.train.lengths()
    return Origin(
        directions=tuple(prepared.report.directions()),
        tagged_languages=tuple(prepared.report.tagged_languages),
        longest_source=int(source_N.max()),
        longest_target=int(target_N.max()),
    )
