"""`transduce check-paper`: the default is the paper, and any departure is named."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from transduce import attention, base, big, model, override, paper_check, small
from transduce.training import recipe


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120"}
    command = [sys.executable, "-W", "error", "-m", "transduce", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_base_and_big_are_the_paper() -> None:
    done = run("check-paper")
    assert (done.returncode, done.stderr) == (0, "")
    assert "differs" not in done.stdout.replace("nothing differs", "")
    for line in ("base beside the paper's base", "big beside the paper's big", "nothing differs from the paper"):
        assert line in done.stdout
    assert "3.2.2     model.n_heads" in done.stdout
    assert (
        "(each trained number once; base and big at exactly 37,000 shared entries: the paper says about)" in done.stdout
    )
    assert "parameters of base: 63,045,632 (63.0 M); the paper prints 65 M" in done.stdout
    assert "parameters of big: 214,171,648 (214.2 M); the paper prints 213 M" in done.stdout


def test_a_departure_is_named_and_exits_with_1() -> None:
    done = run(
        "check-paper", "--config", "base", "--set", "train.adam_beta2=0.997", "--set", "model.norm=pre", "--json"
    )
    assert (done.returncode, done.stderr) == (1, "")
    (check,) = json.loads(done.stdout)["checks"]
    different = {row["setting"]: (row["paper"], row["ours"]) for row in check["rows"] if row["verdict"] == "differs"}
    assert different == {"train.adam_beta2": (0.98, 0.997), "model.norm": ("post", "pre")}


def test_a_smaller_size_lists_its_numbers_and_keeps_the_form() -> None:
    done = run("check-paper", "--config", "small")
    assert done.returncode == 1
    different = {row.setting for row in paper_check.check_paper(small(), "base") if row.verdict == "differs"}
    assert different == {
        *("model.n_encoder_layers", "model.n_decoder_layers", "model.d_model", "model.d_ff", "model.n_heads"),
        *("model.source_vocab_size", "model.target_vocab_size"),
    }
    assert "differing from the paper: model.n_encoder_layers, model.n_decoder_layers, model.d_model" in done.stdout


def test_a_file_is_checked_against_either_model(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(big().to_json())
    assert "(214.2 M)" in run("check-paper", "--config", str(file), "--against", "big").stdout.splitlines()[-3]
    assert run("check-paper", "--config", str(file), "--against", "big").returncode == 0
    assert run("check-paper", "--config", str(file)).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.n_heads=0"], "transduce: model.n_heads is 0, must be at least 1: raise it"),
        (["--set", "model.n_haeds=8"], "transduce: 'n_haeds' is not a field of section model: did you mean n_heads?"),
        (
            ["--config", "nowhere.json"],
            "transduce: nowhere.json cannot be read (No such file or directory): give base,",
        ),
        (["--against", "huge"], "transduce: --against is 'huge', must be base or big: the paper has no other"),
        (["--config", ""], "transduce:  cannot be read"),
        (["--no-such-option"], "transduce: No such option: --no-such-option"),
        (["--config", "."], "transduce: . cannot be read (Is a directory): give base,"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    done = run("check-paper", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_file_name_is_no_markup(tmp_path: Path) -> None:
    file = tmp_path / "[red]run[" / "]"
    file.parent.mkdir()
    file.write_text(base().to_json())
    done = run("check-paper", "--config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "[red]run[" in done.stdout


def test_parameters_of_what_was_checked_stand_there_once() -> None:
    assert run("check-paper", "--config", "base").stdout.count("parameters of") == 2
    assert "parameters of small, as checked: 7,568,384 (7.6 M)\n" in run("check-paper", "--config", "small").stdout
    changed = run("check-paper", "--config", "base", "--set", "model.d_ff=1024").stdout
    assert "parameters of base: 63,045,632" in changed
    assert f"parameters of base, as checked: {63_045_632 - 12 * (2 * 512 + 1) * 1024:,}" in changed


def test_a_small_difference_can_be_seen() -> None:
    assert "0.98000001" in run("check-paper", "--set", "train.adam_beta2=0.98000001").stdout


def test_every_setting_has_a_verdict() -> None:
    fields = {f"{section}.{name}" for section, of in asdict(base()).items() for name in of}
    rows = {row.setting for row in paper_check.check_paper(base(), "base")}
    assert fields <= rows
    stated = {setting for _, setting, _, _ in paper_check.SETTINGS}
    assert stated <= fields, "the paper's settings name fields that exist"
    assert {row.setting for row in paper_check.check_paper(base(), "base") if row.verdict == "not stated"} == {
        *("model.max_positions", "model.output_bias", "model.norm_eps", "model.pad_id", "model.bos_id", "model.eos_id"),
        *("data.n_shapes", "data.valid_pairs", "data.max_characters", "data.max_length_ratio"),
        *("data.min_letter_share", "train.seed", "train.checkpoint_steps", "train.patience"),
        *("train.max_bad_steps", "train.clip_norm", "decode.n_best", "decode.min_length", "decode.no_repeat_ngram"),
        *(
            "decode.temperature",
            "decode.top_k",
            "decode.top_p",
            "decode.seed",
            "train.valid_translations",
            "train.valid_sample",
        ),
    }


def test_formulas_are_measured_on_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured row turns to "differs" when the code behind it is changed."""

    def verdicts() -> dict[str, str]:
        return {
            row.setting.split(":")[0]: row.verdict
            for row in paper_check.check_paper(base(), "base")
            if ":" in row.setting
        }

    assert set(verdicts().values()) == {"same"}
    assert len(verdicts()) == 4
    real_attend, real_rate, real_sinusoid = attention.attend_fast, recipe.learning_rate, model.sinusoid

    def unscaled(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return real_attend(query * query.shape[-1] ** 0.5, *rest)

    def slow_rate(step: int, d_model: int, warmup_steps: int) -> float:
        return real_rate(step, d_model, 2 * warmup_steps)

    def other_waves(position: torch.Tensor, d_model: int) -> torch.Tensor:
        return real_sinusoid(position * 2, d_model)

    for place, name, fake, row in [
        (paper_check, "attend_fast", unscaled, "attention scale"),
        (paper_check, "learning_rate", slow_rate, "highest learning rate"),
        (paper_check, "sinusoid", other_waves, "longest wave / 2 pi"),
        (math, "sqrt", lambda x: x, "embedding scale"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fake)
            assert verdicts()[row] == "differs", row


def test_parameters_are_counted_on_the_model_itself() -> None:
    counts = {size: ours for size, _, ours in paper_check.parameter_counts()}
    assert counts["base"] == sum(p.numel() for p in model.Transformer(base().model).parameters())
    untied = override(base(), ["model.tied_embeddings=none"])
    assert paper_check.count_parameters(untied) == counts["base"] + 2 * 37_000 * 512


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == "0.1.0"
    assert "Examples" in run("check-paper", "--help").stdout
    assert run("no-such-command").returncode == 2
