"""Ablation: a removed part has the effect of a zero output, the model is unchanged, and changes have intervals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.command import refusal
from tests.support.primes import prime_config, random_ids, random_model
from transduce import Transformer, Translator, reference, tiny, with_model
from transduce.config import override
from transduce.evaluation.evaluate import perplexity_of
from transduce.evaluation.metrics import bleu, chrf, resampled, resampled_mean
from transduce.insight.ablation import LOSS, Part, ablate, grids, removable_parts, without_part
from transduce.insight.ablation_views import ablation_figure, show_ablation
from transduce.translation.result import Translation

SOURCES = ["Das ist gut.", "Ich habe ein Haus.", "Wo ist Tom?", "Ja."]
REFERENCES = ["That is good.", "I have a house.", "Where is Tom?", "Yes."]

CALLS = {  # the index of the reference's call of `attend` for each head; the encoder has two layers
    Part("encoder", 0, "self_attention", 3): 0,
    Part("encoder", 1, "self_attention", 18): 1,
    Part("decoder", 0, "self_attention", 0): 2,
    Part("decoder", 3, "self_attention", 5): 8,
    Part("decoder", 0, "memory_attention", 7): 3,
    Part("decoder", 4, "memory_attention", 1): 11,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", CALLS, ids=lambda part: part.name)
def test_removing_a_head_equals_the_reference_with_zero_head_output(
    part: Part, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(prime_config(attention_bias=bias))
    source_BS, target_BT = random_ids(model.config)
    n_calls, attend = 0, reference.attend

    def without_head(*arguments: Any) -> tuple[Any, Any]:
        nonlocal n_calls
        head_BHQU, weight_BHQM = attend(*arguments)
        if n_calls == CALLS[part]:
            head_BHQU[:, part.head] = 0
        n_calls += 1
        return head_BHQU, weight_BHQM

    monkeypatch.setattr(reference, "attend", without_head)
    weights = {name: W.numpy() for name, W in model.weights().items()}
    expected = reference.transformer(weights, model.config, source_BS.numpy(), target_BT.numpy()).logits_BTV
    with torch.no_grad():
        reduced = without_part(model, part)(source_BS, target_BT).logits_BTV
        whole = model(source_BS, target_BT).logits_BTV
    np.testing.assert_allclose(reduced, expected, atol=1e-9)
    assert not torch.allclose(reduced, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stack", "attention"), [("encoder", "self"), ("decoder", "self"), ("decoder", "memory")])
def test_removing_an_attention_removes_its_output_and_its_bias(
    stack: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(prime_config(attention_bias=True))
    source_BS, target_BT = random_ids(model.config)
    multi_head, weights = reference.multi_head, {name: W.numpy() for name, W in model.weights().items()}

    def without_attention(layer: Any, name: str, *rest: Any) -> tuple[Any, Any]:
        output_BQD, weight_BHQM = multi_head(layer, name, *rest)
        is_removed = name == f"{attention}_attention" and np.array_equal(
            layer[f"{name}.W_Q"], weights[f"{stack}.1.{name}.W_Q"]
        )
        return output_BQD * (not is_removed), weight_BHQM

    monkeypatch.setattr(reference, "multi_head", without_attention)
    expected = reference.transformer(weights, model.config, source_BS.numpy(), target_BT.numpy()).logits_BTV
    with torch.no_grad():
        part = Part(stack, 1, f"{attention}_attention")  # type: ignore[arg-type]
        logits_BTV = without_part(model, part)(source_BS, target_BT).logits_BTV
    np.testing.assert_allclose(logits_BTV, expected, atol=1e-9)


@pytest.mark.parametrize("part", [Part("encoder", 0), Part("decoder", 3)], ids=lambda part: part.name)
def test_removing_a_layer_equals_a_model_built_without_it(part: Part) -> None:
    model = random_model(prime_config())
    source_BS, target_BT = random_ids(model.config)
    reduced = without_part(model, part)
    shallow = random_model(reduced.config, seed=7)
    renumbered = {}
    for name, W in model.weights().items():
        stack, _, rest = name.partition(".")
        layer, _, weight = rest.partition(".")
        if stack == part.stack and int(layer) != part.layer:
            renumbered[f"{stack}.{int(layer) - (int(layer) > part.layer)}.{weight}"] = W
        elif stack != part.stack:
            renumbered[name] = W
    shallow.load_weights(renumbered)
    with torch.no_grad():
        torch.testing.assert_close(reduced(source_BS, target_BT).logits_BTV, shallow(source_BS, target_BT).logits_BTV)


def test_removing_parts_leaves_the_model_unchanged() -> None:
    model = random_model(prime_config(attention_bias=True))
    before = {name: W.clone() for name, W in model.weights().items()}
    for part in removable_parts(model.config):
        reduced = without_part(model, part)
        assert reduced.embedding.source_embedding is model.embedding.source_embedding, "shared, not copied"
    assert model.config == prime_config(attention_bias=True)
    torch.testing.assert_close(model.weights(), before, rtol=0, atol=0)


def test_every_head_attention_and_layer_is_removable_once() -> None:
    config = prime_config(n_encoder_layers=2, n_decoder_layers=5, n_heads=3)
    parts = removable_parts(config)
    assert len(parts) == len(set(parts)) == 2 * (3 + 1 + 1) + 5 * (2 * 4 + 1)
    assert [part for part in removable_parts(prime_config(n_encoder_layers=1)) if part.attention is None] == [
        Part("decoder", layer) for layer in range(5)
    ], "the only layer of a stack is not removable"
    assert Part("decoder", 1, "memory_attention", 0).name == "decoder layer 2, memory attention, head 1"
    assert Part("encoder", 0, "self_attention").name == "encoder layer 1, self-attention"
    shown = [part for grid in grids(config) for row in grid.parts for part in row if part is not None]
    assert sorted(shown, key=str) == sorted(parts, key=str)


@pytest.fixture(scope="module")
def small() -> Translator:
    """A small random model, so that translations are fast."""
    bundled = Translator.load(device="cpu")
    changes = {"n_encoder_layers": 1, "n_decoder_layers": 2, "d_model": 22, "d_ff": 13, "n_heads": 2}
    config = override(with_model(tiny(), **changes), ["decode.beam_size=1", "decode.max_extra_tokens=2"])
    torch.manual_seed(3)
    return Translator(Transformer(config.model).eval(), config, bundled.subwords)


def test_changes_are_differences_of_scores_with_paired_intervals(
    small: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The translations are scripted: without its second layer, the decoder gets one sentence of four wrong."""
    translations = {2: REFERENCES, 1: [*REFERENCES[:3], "No."]}

    def scripted(self: Translator, texts: Any, to: Any) -> list[Translation]:
        return [Translation(text, 0.0, 0.0) for text in translations[self.config.model.n_decoder_layers]]

    monkeypatch.setattr(Translator, "translate", scripted)
    ablation = ablate(small, SOURCES, REFERENCES, n_bootstrap=100)
    changes = {removal.part: removal.changes for removal in ablation.removals}
    assert list(changes) == removable_parts(small.config.model)
    layer_change = changes[Part("decoder", 1)]
    reduced_translations = translations[1]
    assert layer_change["BLEU"].value == pytest.approx(bleu(reduced_translations, REFERENCES, 0).value - 100)
    assert layer_change["chrF++"].value == pytest.approx(chrf(reduced_translations, REFERENCES, 0).value - 100)
    low, high = layer_change["BLEU"].interval or (1, 1)
    assert low < layer_change["BLEU"].value < high <= 0
    head_change = changes[Part("decoder", 1, "self_attention", 0)]["BLEU"]
    assert (head_change.value, head_change.interval, head_change.is_significant) == (0, (0, 0), False)
    reduced = Translator(without_part(small.model, Part("decoder", 1)), small.config, small.subwords)
    perplexities = [perplexity_of(model, SOURCES, REFERENCES, None)[0] or 0 for model in (reduced, small)]
    assert layer_change[LOSS].value == pytest.approx(np.log(perplexities[0] / perplexities[1]))


def test_a_paired_interval_is_narrower_than_that_of_one_score() -> None:
    hypotheses, others = ["a b c d e", "x y z u v", "a b c d e"] * 9, ["a b c d f", "x y z u w", "a b c d f"] * 9
    references = ["a b c d e", "q r s t v", "a b c d e"] * 9
    one, other = resampled("BLEU", hypotheses, references), resampled("BLEU", others, references)
    paired, single = one.minus(other).interval or (0, 0), one.interval or (0, 0)
    assert 0 < paired[0] <= one.value - other.value <= paired[1]
    assert paired[1] - paired[0] < single[1] - single[0]
    assert bleu(hypotheses, references).interval == one.interval
    mean = resampled_mean("loss", [2.0, 30.0], [1, 9], 100)
    assert mean.value == pytest.approx(3.2)
    assert mean.interval == pytest.approx((2.0, 30 / 9))
    assert set(mean.samples.round(3)) == {2.0, 3.2, 3.333}, "each sentence once, or one of them twice"
    assert resampled_mean("loss", [2.0], [1], 0).interval is None


def test_the_tables_and_the_figure_show_all_parts(small: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    from transduce.cli.show.tables import console_for_stdout

    ablation = ablate(small, SOURCES, REFERENCES, n_bootstrap=0)
    show_ablation(console_for_stdout(), ablation, small.config.model)
    shown = capsys.readouterr().out
    assert "4 sentences; complete model: BLEU" in shown
    assert all(f"{removal.part.name} " in shown for removal in ablation.removals)
    texts = [text.get_text() for axes in ablation_figure(ablation, small.config.model).axes for text in axes.texts]
    assert sorted(texts) == sorted(f"{removal.changes['BLEU'].value:+.1f}" for removal in ablation.removals)


def test_a_pair_longer_than_the_training_data_is_excluded_from_the_loss(small: Translator) -> None:
    origin = replace(small.origin, longest_source=9, longest_target=9)
    strict = Translator(small.model, small.config, small.subwords, origin)
    both = ablate(strict, ["Das ist gut. " * 9, "Ja."], ["That is good.", "Yes."], n_bootstrap=0)
    alone = ablate(strict, ["Ja."], ["Yes."], n_bootstrap=0)
    assert (both.n_without_loss, alone.n_without_loss) == (1, 0)
    assert both.whole[LOSS].value == pytest.approx(alone.whole[LOSS].value, rel=1e-5)


@pytest.mark.slow
def test_the_command_reports_that_the_alignment_head_matters_most(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transduce", "ablate", "--sentences", "150", "--device", "cpu"]
    result = subprocess.run([*command, "--json", "--png", str(tmp_path / "a.png")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "removing one part at a time" in result.stderr
    ablation = json.loads(result.stdout)
    assert (ablation["n_sentences"], len(ablation["parts"])) == (150, 51)
    heads = [part for part in ablation["parts"] if part["head"] is not None]
    worst = min(heads, key=lambda part: float(part["changes"]["BLEU"]["value"]))
    place = [worst[name] for name in ("stack", "layer", "attention", "head")]
    assert place == ["decoder", 0, "memory_attention", 1], "the head that the model folder names for alignment"
    assert worst["changes"]["BLEU"]["interval"][1] < 0
    assert (tmp_path / "a.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "IN"], "--source and --reference are both needed: add --source FILE --reference FILE"),
        (["--source", "NONE", "--reference", "IN"], "NONE cannot be read (No such file or directory)"),
        (["--source", "IN", "--reference", "LONG"], "has 1 lines, LONG has 2: give files with corresponding lines"),
        (["--source", "EMPTY", "--reference", "EMPTY"], "EMPTY is empty: give a file with one sentence per line"),
        (["--svg", "x.pdf"], "x.pdf must end in .svg or .png: rename it"),
        (["--png", "NONE/x.png"], "x.png cannot be written (No such file or directory)"),
        (["--bootstrap", "3"], "n_bootstrap must be 0 (no interval) or at least 40, got 3"),
        (["NONE", "--source", "IN", "--reference", "IN"], "NONE/config.json cannot be read"),
    ],
)
def test_bad_input_gives_a_one_line_message_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "IN").write_text("Ja.\n")
    (tmp_path / "LONG").write_text("Ja.\nJa.\n")
    (tmp_path / "EMPTY").write_text("")
    for name in ("NONE", "IN", "LONG", "EMPTY"):
        arguments = [argument.replace(name, str(tmp_path / name)) for argument in arguments]
        message = message.replace(name, str(tmp_path / name))
    assert message in refusal(monkeypatch, capsys, "ablate", *arguments, "-q", "--device", "cpu")
