"""What other programs make of our weights is what we make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bundled import heldout
from tests.support.primes import prime_config, random_model
from transduce import ConfigError, Translator
from transduce.config import DecodeConfig
from transduce.data.subword import Subwords
from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import to_marian

ctranslate2: Any = pytest.importorskip("ctranslate2")

N = 150


@pytest.fixture(scope="module")
def bundled() -> Translator:
    return Translator.load(device="cpu")


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return heldout()[0][:N]


def ours(translator: Translator, sources: list[str], **changes: Any) -> list[str]:
    settings = replace(translator.settings, **changes)
    own = Translator(translator.model, translator.config, translator.subwords, translator.origin, settings=settings)
    return [translation.text for translation in own.translate(sources)]


def by_ctranslate2(translator: Translator, folder: Path, sources: list[str], **settings: Any) -> list[str]:
    theirs = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=2)
    subwords = translator.subwords
    number = {piece: i for i, piece in enumerate(subwords.pieces(range(len(subwords))))}
    pieces = [subwords.pieces(ids) for ids in subwords.encode(sources)]
    found = theirs.translate_batch(pieces, max_decoding_length=100, **settings)
    return subwords.decode([[number[piece] for piece in one.hypotheses[0]] for one in found])


def agreement(one: list[str], other: list[str]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_ctranslate2_says_the_same(bundled: Translator, sources: list[str], tmp_path: Path) -> None:
    to_ctranslate2(bundled.model, bundled.subwords, tmp_path / "model")
    greedy = ours(bundled, sources, beam_size=1)
    assert by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=1) == greedy
    # Its beam ends as soon as there are as many translations as it is wide, ours when nobody can win any more.
    wide = ours(bundled, sources, beam_size=4, length_penalty="length", length_alpha=1.0)
    found = by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=4, length_penalty=1.0)
    assert agreement(wide, found) > 0.95
    assert agreement(greedy, found) < agreement(wide, found)


def test_ctranslate2_in_int8_says_nearly_the_same(bundled: Translator, sources: list[str], tmp_path: Path) -> None:
    to_ctranslate2(bundled.model, bundled.subwords, tmp_path / "model", "int8")
    found = by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=1)
    assert agreement(ours(bundled, sources, beam_size=1), found) > 0.8
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("model.bin"))
    assert weights < 10e6


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "pre"},
        {"positions": "learned"},
        {"attention_bias": True, "output_bias": True},
        {"activation": "gelu"},
        {"tied_embeddings": "none"},
    ],
    ids=str,
)
def test_ctranslate2_says_the_same_of_other_forms(changes: dict[str, Any], tmp_path: Path) -> None:
    """Random weights: long babble, in which any fault shows."""
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22, "dropout": 0.0} | changes))
    subwords = Subwords.train(["das ist gut", "that is good"], 300)
    config = replace(config, source_vocab_size=300, target_vocab_size=300)
    model = random_model(config, torch.float32).eval()
    settings = DecodeConfig(beam_size=1, max_extra_tokens=10)
    run = replace(Translator.load(device="cpu").config, model=config, decode=settings)
    own = Translator(model, run, subwords, settings=settings)
    expected = [model_ids(own, text) for text in TEXTS]
    to_ctranslate2(model, subwords, tmp_path / "model")
    theirs = ctranslate2.Translator(str(tmp_path / "model"), inter_threads=1, intra_threads=1)
    pieces = [subwords.pieces(ids) for ids in subwords.encode(TEXTS)]
    found = theirs.translate_batch(pieces, beam_size=1, max_decoding_length=12, min_decoding_length=12)
    number = {piece: i for i, piece in enumerate(subwords.pieces(range(300)))}
    for ids, one in zip(expected, found, strict=True):
        assert [number[piece] for piece in one.hypotheses[0]] == ids


TEXTS = ["das ist gut", "gut", "ist das gut?", "that"]


def model_ids(translator: Translator, text: str) -> list[int]:
    """Twelve tokens, the most probable each time, none of them an end, as the other is told to do."""
    config, model = translator.config.model, translator.model
    (ids,) = translator.subwords.encode([text])
    state, last, found = model.start(torch.tensor([[*ids, config.eos_id]])), config.bos_id, list[int]()
    for _ in range(12):
        logits_RV, state = model.step(torch.tensor([last]), state)
        logits_RV[:, [config.eos_id]] = -torch.inf
        last = int(logits_RV.argmax())
        found.append(last)
    return found


def test_marian_generates_the_same(bundled: Translator, sources: list[str]) -> None:
    config, subwords = bundled.config.model, bundled.subwords
    theirs = to_marian(bundled.model)
    found = []
    for ids in subwords.encode(sources[:30]):
        source_BS = torch.tensor([[*ids, config.eos_id]])
        generated = theirs.generate(
            input_ids=source_BS, num_beams=1, do_sample=False, max_new_tokens=60, bad_words_ids=[[config.pad_id]]
        )
        found.append([i for i in generated[0].tolist()[1:] if i not in (config.eos_id, config.pad_id)])
    assert subwords.decode(found) == ours(bundled, sources[:30], beam_size=1)


@pytest.mark.parametrize("changes", [{"d_v": 11}, {"attention_window": 6}], ids=str)
def test_what_ctranslate2_cannot_be_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22} | changes))
    with pytest.raises(ConfigError, match=f"CTranslate2 wants model.{next(iter(changes))}="):
        to_ctranslate2(random_model(config), Subwords.train(["gut"], 265), tmp_path / "model")
    assert not (tmp_path / "model").exists()
