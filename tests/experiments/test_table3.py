"""Table 3: rows change what the paper changes at any width, variants are correct, and one command runs all rows."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import table3
from experiments.gradient_norms import gradient_norms
from experiments.published import TABLE_3
from experiments.runs import settings_from
from experiments.table3 import DEPTH, ROWS, Job, Row, big, one_narrow_head, run_one, scaled
from experiments.variants import VARIANTS, no_self_attention, unscaled
from tests.support.pairs import sentences, write_pairs
from tests.support.primes import prime_config, random_ids, random_model
from transduce import ConfigError, DataConfig, Transformer, Translator, base, override, with_model
from transduce import big as paper_big
from transduce.data.batches import steps
from transduce.data.corpora import find_corpus
from transduce.data.plan import make_layout
from transduce.data.prepare import Prepared, prepare
from transduce.evaluation import evaluate
from transduce.model import MultiHeadAttention, Output, SelfAttention
from transduce.paper_check import count_parameters
from transduce.training import choices
from transduce.training.recipe import learning_rate, model_loss, scheduled_rate

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
WIDTHS = ("d_model", "d_ff", "d_k", "d_v")


def row(key: str) -> Row:
    (match,) = (row for row in ROWS if row.key == key)
    return match


# Rows


@pytest.mark.parametrize("path", sorted(RESULTS.glob("table3_*.json")), ids=lambda path: path.stem)
def test_the_committed_runs_are_runs_of_rows(path: Path) -> None:
    """Otherwise no table shows them, and the command repeats them."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert runs
    assert {run["row"] for run in runs} <= {row.key for row in ROWS}


def test_rows_of_the_paper_have_its_settings() -> None:
    """The numbers are those that Table 3 prints."""
    expected: dict[str, dict[str, Any]] = {
        "A: 1 head": {"n_heads": 1, "d_k": 512, "d_v": 512},
        "A: 4 heads": {"n_heads": 4, "d_k": 128, "d_v": 128},
        "A: 16 heads": {"n_heads": 16, "d_k": 32, "d_v": 32},
        "A: 32 heads": {"n_heads": 32, "d_k": 16, "d_v": 16},
        "B: d_k / 4": {"d_k": 16},
        "B: d_k / 2": {"d_k": 32},
        "C: depth / 3": {"n_encoder_layers": 2, "n_decoder_layers": 2},
        "C: depth x 2/3": {"n_encoder_layers": 4, "n_decoder_layers": 4},
        "C: depth x 4/3": {"n_encoder_layers": 8, "n_decoder_layers": 8},
        "C: d_model / 2": {"d_model": 256, "d_k": 32, "d_v": 32},
        "C: d_model x 2": {"d_model": 1024, "d_k": 128, "d_v": 128},
        "C: d_ff / 2": {"d_ff": 1024},
        "C: d_ff x 2": {"d_ff": 4096},
        "D: dropout 0": {"dropout": 0.0},
        "D: dropout 0.2": {"dropout": 0.2},
        "E: learned positions": {"positions": "learned"},
        "base: base": {},
    }
    for key, changes in expected.items():
        assert row(key).change(base()) == with_model(base(), **changes), key
    for share in (0.0, 0.2):
        changed = row(f"D: label smoothing {share:g}").change(base())
        assert changed == override(base(), [f"train.label_smoothing={share}"])
    assert big(base()) == override(paper_big(), ["train.average_last=5"]), (
        "the only difference is averaging, which these runs do not use"
    )
    assert {(one.letter, one.name) for one in ROWS if one.letter != "extra"} == TABLE_3.keys()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("key", [row.key for row in ROWS])
def test_a_row_changes_the_same_settings_by_the_same_factors_at_any_scale(key: str, depth: int) -> None:
    (small, wide), paper = ((row(key).change(one), one) for one in (scaled(4, depth, 3000), base())), base()
    for changed, whole in (small, wide):
        for name in (*WIDTHS, *DEPTH, "n_heads"):
            ratio = getattr(changed.model, name) / getattr(whole.model, name)
            at_paper = getattr(row(key).change(paper).model, name) / getattr(paper.model, name)
            assert math.isclose(ratio, at_paper, rel_tol=0.01), name
    changed_settings = {name.partition("=")[0] for name in settings_from(small[0], small[1])}
    assert changed_settings == {name.partition("=")[0] for name in settings_from(wide[0], wide[1])}


def test_parameter_counts_are_those_that_the_paper_prints() -> None:
    """The paper rounds to millions and has "about" 37,000 subwords. The difference between a row and base depends on
    neither."""
    whole, printed = count_parameters(base()) / 1e6, TABLE_3["base", "base"].parameters
    assert printed is not None
    n_compared = 0
    for one in ROWS:
        figures = TABLE_3.get((one.letter, one.name))
        if figures is None or figures.parameters is None:
            continue
        config = one.change(base())
        ours = count_parameters(config) / 1e6
        assert abs(ours - figures.parameters) < max(2.7, 0.03 * figures.parameters), one.key
        if config.model.d_model == base().model.d_model:
            assert abs((ours - whole) - (figures.parameters - printed)) < 1, one.key
            n_compared += 1
    assert n_compared == 8


def test_one_narrow_head_has_the_number_of_parameters_of_eight_heads() -> None:
    for config in (base(), scaled(4, 1, 3000)):
        changed = one_narrow_head(config)
        assert (changed.model.n_heads, changed.model.d_k) == (1, config.model.d_k)
        assert math.isclose(count_parameters(changed), count_parameters(config), rel_tol=0.002)


def test_a_scaled_base_differs_from_base_only_in_widths_and_length_of_training() -> None:
    config = scaled(4, 1, 3000)
    assert [getattr(config.model, name) for name in WIDTHS] == [128, 512, 16, 16]
    assert with_model(config, d_model=512, d_ff=2048, d_k=64, d_v=64).model == base().model
    peak = config.train.rate_factor * learning_rate(config.train.warmup_steps, 128, config.train.warmup_steps)
    assert math.isclose(peak, learning_rate(4000, 128, 4000))
    assert scaled(4, 2, 3000) == with_model(config, n_encoder_layers=3, n_decoder_layers=3)
    changed = {name.partition("=")[0] for name in settings_from(config, base()) if not name.startswith("model.")}
    assert changed == {
        *("data.batch_tokens", "data.n_shapes", "train.max_steps", "train.warmup_steps", "train.rate_factor"),
        *("train.average_last", "train.valid_translations"),
    }


def test_a_scale_that_does_not_divide_widths_and_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"d_model 170\.667"):
        scaled(3, 1, 100)
    with pytest.raises(ConfigError, match=r"n_encoder_layers 1\.5, n_decoder_layers 1\.5 is not a whole number"):
        scaled(4, 4, 100)


# Variants


def random_logits(model: Transformer) -> Tensor:
    output: Output = model(*random_ids(model.config))
    return output.logits_BTV


def test_unscaled_attention_is_attention_with_larger_queries() -> None:
    model, larger = random_model(prime_config()), random_model(prime_config())
    with unscaled():
        logits_BTV, with_weights = random_logits(model), model(*random_ids(model.config), with_attention=True)
    assert not torch.allclose(logits_BTV, random_logits(model), atol=1e-3), "the variant has an effect, and it ends"
    for name, W in larger.weights().items():
        if name.endswith(".W_Q"):
            W.mul_(math.sqrt(7))
    assert torch.allclose(logits_BTV, random_logits(larger), atol=1e-10)
    assert torch.allclose(with_weights.logits_BTV, random_logits(larger), atol=1e-10)


def test_without_self_attention_a_source_position_affects_only_its_own_memory() -> None:
    model = random_model(prime_config())
    source_BS, _ = random_ids(model.config)
    other_BS = source_BS.clone()
    other_BS[0, 5] = 3 if source_BS[0, 5] != 3 else 4
    before, after = (model.encode(ids_BS).memory_BSD for ids_BS in (source_BS, other_BS))
    assert bool((before != after)[0, 6:].any()), "with self-attention, later positions change too"
    with no_self_attention():
        before, after = (model.encode(ids_BS).memory_BSD for ids_BS in (source_BS, other_BS))
    changed_BS = (before != after).any(-1)
    assert changed_BS.nonzero().tolist() == [[0, 5]]


def test_without_self_attention_the_decoder_sees_only_the_last_token_and_the_memory() -> None:
    model = random_model(prime_config())
    source_BS, target_BT = random_ids(model.config)
    other_BT = target_BT.clone()
    other_BT[0, 5] = 3 if target_BT[0, 5] != 3 else 4
    with no_self_attention():
        before, after = (model(source_BS, ids_BT).logits_BTV for ids_BT in (target_BT, other_BT))
        of_another_source = model(source_BS.roll(1, 0), target_BT).logits_BTV
    assert (before != after).any(-1).nonzero().tolist() == [[0, 5]]
    assert bool((before != of_another_source).any(-1).all())


@pytest.mark.parametrize("name", ["unscaled", "no self-attention"])
def test_settled_weights_give_the_output_of_the_variant(name: str) -> None:
    model = random_model(prime_config())
    with VARIANTS[name].during():
        during = random_logits(model)
    VARIANTS[name].settle(model)
    assert torch.allclose(random_logits(model), during, atol=1e-10)


def test_unused_parameters_are_those_without_a_gradient() -> None:
    config = prime_config()
    model = Transformer(config)
    source_BS, target_BT = random_ids(config)
    with no_self_attention():
        model(source_BS, target_BT).logits_BTV.sum().backward()
    n_idle = sum(p.numel() for p in model.parameters() if p.grad is None)
    assert VARIANTS["no self-attention"].n_unused(config) == n_idle > 0
    assert VARIANTS["unscaled"].n_unused(config) == 0


@pytest.mark.parametrize("key", ["extra: no warm-up", "extra: pre-norm, no warm-up"])
def test_without_warm_up_the_rate_starts_at_its_peak_and_ends_as_usual(key: str) -> None:
    usual, changed = base().train, row(key).change(base()).train
    rates = [scheduled_rate(step, 128, changed) for step in (1, 2000, 4000, 4001, 9000)]
    assert rates == pytest.approx([scheduled_rate(step, 128, usual) for step in (4000, 4000, 4000, 4001, 9000)])
    assert rates[0] > scheduled_rate(1, 128, usual)


def test_replaced_functions_are_restored_after_an_error() -> None:
    original, is_inherited = MultiHeadAttention.forward, "forward" in vars(SelfAttention)
    with pytest.raises(ZeroDivisionError), unscaled(), no_self_attention():
        raise ZeroDivisionError
    assert MultiHeadAttention.forward is original
    assert ("forward" in vars(SelfAttention)) == is_inherited


# Runs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table3")
    files = write_pairs(folder, "a", sentences(500))
    prepare([find_corpus(files, None)], folder / "prepared", DataConfig(valid_pairs=40), vocab_size=300)
    return folder / "prepared"


TOY = [
    "--scale",
    "16",
    "--steps",
    "4",
    "--device",
    "cpu",
    "--sentences",
    "5",
    "--depth",
    "2",
    "--set",
    "data.batch_tokens=500",
    "decode.max_extra_tokens=3",
]


def test_the_command_runs_missing_runs_and_prints_all_tables(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table3.json"
    names = ["base", "16 heads", "no self-attention"]
    command = ["--prepared", str(prepared), "--out", str(out), *TOY, "--rows", "base", "A", "extra", "--names", *names]
    table3.main([*command[:-1], "--seeds", "1"])
    table3.main([*command, "--seeds", "1"])
    result = json.loads(out.read_text())
    assert [run["row"] for run in result["runs"]] == ["base: base", "A: 16 heads", "extra: no self-attention"]
    for run in result["runs"]:
        assert run["config"]["train"]["seed"] == run["seed"] == 1
        assert (run["steps"], run["averaged"], run["n_sentences"]) == (4, 1, 5)
        assert run["search"] == "beam 4, length penalty 0.6"
        assert run["signature"].startswith("nrefs:1|")
        assert {"config_hash", "commit", "device", "minutes", "versions"} <= run.keys()
    alone = result["runs"][-1]
    assert (alone["passes"], alone["variant"]) == ("plain", "no self-attention")
    assert alone["parameters"] == result["runs"][0]["parameters"] - 6 * 4 * 32 * 32
    assert [(one["norm"], one["seed"]) for one in result["gradient_norms"]] == [("post", 1), ("pre", 1)]
    monkeypatch.setattr(table3, "run_one", lambda *_: pytest.fail("this run is already in the result"))
    capsys.readouterr()
    table3.main([*command, "--seeds", "1", "--svg", str(tmp_path / "rows.svg")])
    drawn = (tmp_path / "rows.svg").read_text()
    assert drawn.count("<circle") == 3
    assert all(f">{name}<" in drawn for name in ("base", "A: 16 heads", "no self-attention"))
    with pytest.raises(SystemExit, match="needs runs of base"):
        table3.draw(tmp_path / "none.svg", {"runs": result["runs"][1:]})
    shown = capsys.readouterr().out
    assert "| A | 16 heads | n_heads 16, d_k 2, d_v 2 |" in shown
    assert "| 4.91 | 25.8 |" in shown
    assert "| extra | no self-attention |" in shown
    assert "| encoder 2 |" in shown
    assert "given the source of another sentence" in shown
    with pytest.raises(SystemExit, match="another kind"):
        table3.main([*command, "--steps", "5"])


def test_the_source_table_compares_two_perplexities_of_each_seed() -> None:
    """Results of older versions have only one perplexity and get no row."""
    known = {"perplexity": 4.0, "bleu": 20.0, "row": "base: base"}
    runs = [known | {"perplexity_of_another_source": wrong} for wrong in (8.0, 16.0)]
    shown = table3.source_table({"runs": [*runs, known | {"row": "big: big"}]})
    assert shown.splitlines()[2:] == ["| base | base | 4.00 ± 0.00 | 12.00 ± 5.66 | 3.0 ± 1.4 | 20.0 ± 0.0 | 2 |"]


def test_the_other_source_is_the_source_of_another_sentence(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def perplexity_of(translator: Translator, sources: list[str], references: list[str], to: None) -> Any:
        calls.append((sources, references))
        return evaluate.perplexity_of(translator, sources, references, to)

    monkeypatch.setattr(table3, "perplexity_of", perplexity_of)
    record = run_one(options_for(prepared), Job("base: base", 1))
    (right, references), (wrong, same) = calls
    assert (sorted(wrong), same) == (sorted(right), references)
    assert all(a != b for a, b in zip(right, wrong, strict=True))
    assert record["perplexity_of_another_source"] != record["perplexity_as_scored"]


def options_for(prepared: Path, *more: str) -> argparse.Namespace:
    return table3.parse(["--prepared", str(prepared), "--out", "unused", *TOY, *more])


@pytest.mark.parametrize("key", ["extra: no 1 / sqrt(d_k)", "extra: no self-attention"])
def test_a_variant_is_scored_as_it_was_trained(prepared: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # bfloat16 is too inaccurate for this comparison.
    monkeypatch.setattr(choices, "fastest_on_cpu", lambda *_: ("float32", 1))
    options = options_for(prepared, "--steps", "30")
    record = run_one(options, Job(key, 1))
    assert record["perplexity_as_scored"] == pytest.approx(record["perplexity"], rel=1e-5)
    changed = VARIANTS[row(key).variant]._replace(settle=lambda model: None)
    monkeypatch.setitem(VARIANTS, row(key).variant, changed)
    unsettled = run_one(options, Job(key, 1))
    assert unsettled["perplexity"] == record["perplexity"]
    assert unsettled["perplexity_as_scored"] != pytest.approx(record["perplexity"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("key", [row.key for row in ROWS])
def test_every_row_runs(prepared: Path, key: str) -> None:
    record = run_one(options_for(prepared), Job(key, 1))
    assert record["steps"] == (12 if key == "big: big" else 4)
    assert record["perplexity"] > 1


def test_the_table_reports_a_run_that_diverged(prepared: Path) -> None:
    options = options_for(prepared, "--steps", "40")
    options.set = [*options.set, "train.rate_factor=1e30"]
    record = run_one(options, Job("base: base", 1))
    assert "NaN or infinite" in record["failed"]
    record |= {"row": "base: base", "seed": 1}
    shown = table3.extra_table({"runs": [record]})
    assert "| base | base |  | diverged |  |  | 0 of 1, the others diverged |  | cpu" in shown


def test_gradient_norms_are_those_of_the_first_step(prepared: Path) -> None:
    config = override(scaled(16, 1, 4), ["data.batch_tokens=300", "model.dropout=0", "model.n_decoder_layers=2"])
    config = with_model(config, source_vocab_size=300, target_vocab_size=300)
    data = Prepared(prepared)
    layers = gradient_norms(config, data, "cpu")["layers"]
    torch.manual_seed(config.train.seed)
    model = Transformer(config.model)
    layout = make_layout(
        *data.train.lengths(), batch_tokens=300, n_shapes=config.data.n_shapes, seed=config.train.seed, micro_tokens=300
    )
    first = next(steps(data.train, layout, config.model, 0))
    for batch in first.batches:
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids) for ids in batch[:3])
        loss_sum = model_loss(model, source_BS, target_in_BT, target_out_BT, 0.1, in_chunks=False)
        (loss_sum / first.n_target_tokens).backward()
    expected = []
    for stack in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model, stack), 1):
            expected.append((stack, number, float(layer.feed_forward.W_2.W.grad.norm())))
    assert [(one["stack"], one["layer"]) for one in layers] == [one[:2] for one in expected]
    assert [one["W_2"] for one in layers] == pytest.approx([one[2] for one in expected], rel=1e-4)
    assert all(one["all"] > one["W_2"] for one in layers)
