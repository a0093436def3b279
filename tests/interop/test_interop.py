"""CTranslate2 and Marian give the same translations as our model, with the same weights."""

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


def by_transduce(translator: Translator, sources: list[str], **changes: Any) -> list[str]:
    settings = replace(translator.settings, **changes)
    changed = Translator(translator.model, translator.config, translator.subwords, translator.origin, settings=settings)
    return [translation.text for translation in changed.translate(sources)]


def by_ctranslate2(translator: Translator, folder: Path, sources: list[str], **settings: Any) -> list[str]:
    converted = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=2)
    subwords = translator.subwords
    id_of = {piece: i for i, piece in enumerate(subwords.pieces(range(len(subwords))))}
    pieces = [subwords.pieces(ids) for ids in subwords.encode(sources)]
    results = converted.translate_batch(pieces, max_decoding_length=100, **settings)
    return subwords.decode([[id_of[piece] for piece in result.hypotheses[0]] for result in results])


def agreement(a: list[str], b: list[str]) -> float:
    """The share of translations that are equal."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_ctranslate2_gives_the_same_translations(bundled: Translator, sources: list[str], tmp_path: Path) -> None:
    to_ctranslate2(bundled.model, bundled.subwords, tmp_path / "model")
    greedy = by_transduce(bundled, sources, beam_size=1)
    assert by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=1) == greedy
    # CTranslate2 ends a search once it has beam_size translations, we end it once no other one can score higher.
    beam = by_transduce(bundled, sources, beam_size=4, length_penalty="length", length_alpha=1.0)
    converted = by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=4, length_penalty=1.0)
    assert agreement(beam, converted) > 0.95
    assert agreement(greedy, converted) < agreement(beam, converted)


def test_ctranslate2_in_int8_gives_nearly_the_same_translations(
    bundled: Translator, sources: list[str], tmp_path: Path
) -> None:
    to_ctranslate2(bundled.model, bundled.subwords, tmp_path / "model", "int8")
    converted = by_ctranslate2(bundled, tmp_path / "model", sources, beam_size=1)
    assert agreement(by_transduce(bundled, sources, beam_size=1), converted) > 0.8
    n_bytes = sum(path.stat().st_size for path in (tmp_path / "model").glob("model.bin"))
    assert n_bytes < 10e6


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
def test_ctranslate2_gives_the_same_tokens_for_other_model_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    """Random weights give long random translations, in which any error of the conversion shows."""
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22, "dropout": 0.0} | changes))
    subwords = Subwords.train(["das ist gut", "that is good"], 300)
    config = replace(config, source_vocab_size=300, target_vocab_size=300)
    model = random_model(config, torch.float32).eval()
    settings = DecodeConfig(beam_size=1, max_extra_tokens=10)
    run = replace(Translator.load(device="cpu").config, model=config, decode=settings)
    translator = Translator(model, run, subwords, settings=settings)
    expected = [greedy_ids(translator, text) for text in TEXTS]
    to_ctranslate2(model, subwords, tmp_path / "model")
    converted = ctranslate2.Translator(str(tmp_path / "model"), inter_threads=1, intra_threads=1)
    pieces = [subwords.pieces(ids) for ids in subwords.encode(TEXTS)]
    results = converted.translate_batch(pieces, beam_size=1, max_decoding_length=12, min_decoding_length=12)
    id_of = {piece: i for i, piece in enumerate(subwords.pieces(range(300)))}
    for ids, result in zip(expected, results, strict=True):
        assert [id_of[piece] for piece in result.hypotheses[0]] == ids


TEXTS = ["das ist gut", "gut", "ist das gut?", "that"]


def greedy_ids(translator: Translator, text: str) -> list[int]:
    """Exactly twelve tokens: each is the most probable one except the end mark, as min_decoding_length requires."""
    config, model = translator.config.model, translator.model
    (source,) = translator.subwords.encode([text])
    state, last, target = model.start(torch.tensor([[*source, config.eos_id]])), config.bos_id, list[int]()
    for _ in range(12):
        logits_RV, state = model.step(torch.tensor([last]), state)
        logits_RV[:, [config.eos_id]] = -torch.inf
        last = int(logits_RV.argmax())
        target.append(last)
    return target


def test_marian_gives_the_same_translations(bundled: Translator, sources: list[str]) -> None:
    config, subwords = bundled.config.model, bundled.subwords
    marian = to_marian(bundled.model)
    targets = []
    for ids in subwords.encode(sources[:30]):
        source_BS = torch.tensor([[*ids, config.eos_id]])
        generated = marian.generate(
            input_ids=source_BS, num_beams=1, do_sample=False, max_new_tokens=60, bad_words_ids=[[config.pad_id]]
        )
        targets.append([i for i in generated[0].tolist()[1:] if i not in (config.eos_id, config.pad_id)])
    assert subwords.decode(targets) == by_transduce(bundled, sources[:30], beam_size=1)


@pytest.mark.parametrize("changes", [{"d_v": 11}, {"attention_window": 6}], ids=str)
def test_ctranslate2_export_refuses_unsupported_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22} | changes))
    with pytest.raises(ConfigError, match=f"CTranslate2 requires model.{next(iter(changes))}="):
        to_ctranslate2(random_model(config), Subwords.train(["gut"], 265), tmp_path / "model")
    assert not (tmp_path / "model").exists()
