"""What is decided before the first step: sizes, passes, budgets and the number of steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import transduce
from tests.support.pairs import sentences, write_pairs
from tests.support.training import config_for, corpus_of, ignore, trainer_for
from transduce import ConfigError, DataConfig, RunConfig, override, tiny, with_model
from transduce.data.corpora import find_corpus
from transduce.data.prepare import Prepared, prepare
from transduce.training import choices
from transduce.training.dial import dial, with_steps
from transduce.training.pace import Speed
from transduce.training.recipe import learning_rate
from transduce.training.request import Request, parse_budget
from transduce.training.run import train
from transduce.training.settle import limit_validation, longest_sentence, resolve_config

SLOW = Speed(
    seconds_per_step=0.1,
    seconds_per_validation=0.2,
    seconds_per_translation=0.05,
    seconds_per_save=0.1,
    tokens_per_second=1.0,
    memory_bytes=0,
)


@pytest.mark.usefixtures("quick_choice")
def test_passes_are_the_written_ones_or_the_reason_is_given() -> None:
    chosen = choices.choose(tiny(), "cpu", 1, 100, False)
    assert (chosen.way, chosen.why_plain) == ("written", None)
    assert choices.choose(tiny(), "cpu", 1, 100, False, "plain").why_plain == "--passes is plain"
    pre_norm = with_model(tiny(), norm="pre")
    assert choices.choose(pre_norm, "cpu", 1, 100, False).why_plain == "model.norm is pre"
    with pytest.raises(ConfigError, match=r"--passes is written, but .* is pre: leave --passes out"):
        choices.choose(pre_norm, "cpu", 1, 100, False, "written")


@pytest.mark.usefixtures("quick_choice")
def test_a_pass_can_hold_the_longest_sentence(tmp_path: Path) -> None:
    long = ("ein Haus und " * 1000, "a house and " * 1000)
    files = write_pairs(tmp_path, "a", [*sentences(60), long, (long[0] + "mehr", long[1] + "more")])
    settings = DataConfig(max_characters=50_000, valid_pairs=0)
    prepare([find_corpus(files, None)], tmp_path / "prepared", settings, vocab_size=300)
    prepared = Prepared(tmp_path / "prepared")
    longest = longest_sentence(prepared)
    assert longest == max(int(length_N.max()) for length_N in prepared.train.lengths()) > 2048
    config, _ = resolve_config(Request(prepared="x", device="cpu"), prepared, None, max_tokens=1.0)
    assert config.data.batch_tokens == longest
    chosen = choices.choose(config, "cpu", 8, longest, False)
    assert chosen.micro_tokens == longest


def test_fewer_pairs_are_validated_if_the_budget_is_short() -> None:
    speed = SLOW._replace(seconds_per_validation=3.0)
    assert limit_validation(config_for(), speed, 60.0, 1000).train.valid_sample == 200, "1 % of 60 s is 0.6 s"
    assert limit_validation(config_for(), speed, 240.0, 1000).train.valid_sample == 800
    assert limit_validation(config_for(), speed, 60.0, 150).train.valid_sample == 150
    assert limit_validation(config_for(), speed, 400.0, 1000).train.valid_sample is None
    assert limit_validation(config_for("train.valid_sample=7"), speed, 1.0, 1000).train.valid_sample == 7


def test_a_validation_of_a_sample_takes_pairs_from_all_over_the_text(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for("train.valid_sample=5"))
    rows = [int(i * (len(prepared.valid) - 1) / 4) for i in range(5)]
    for place, row in enumerate(rows):
        ours, theirs = trainer.validation.examples.pair(place), prepared.valid.pair(row)
        assert [side.tolist() for side in ours] == [side.tolist() for side in theirs]
    assert trainer.validation.n_target_tokens == sum(len(prepared.valid.pair(row)[1]) + 1 for row in rows)


def test_a_hopeless_budget_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "a", sentences(60))
    request = Request(
        data=corpus_of(files), size="base", budget="2m", device="cpu", settings=["data.batch_tokens=10000000"]
    )
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"--budget is 120 s, but 10 steps of 10,000,000 tokens take at least .* s on"
    ):
        train(tmp_path / "run", request, ignore, ignore)
    assert time.monotonic() - began < 10
    assert not (tmp_path / "run").exists()


def test_budgets_are_times() -> None:
    assert [parse_budget(text) for text in ("90s", "20m", "1.5h", " 2 h ")] == [90, 1200, 5400, 7200]
    for text in ("", "20", "0m", "-3m", "m", "1d"):
        with pytest.raises(ConfigError, match="must be a time such as 90s, 20m or 2h"):
            parse_budget(text)


def test_the_dial_keeps_the_form_and_the_papers_numbers() -> None:
    for size in ("base", "big"):
        config, _ = dial(1000, 10_000, True, size, None)
        assert config == getattr(transduce, size)()
    sizes = [dial(n, 10 * n, True, None, None) for n in (100, 5_000, 40_000, 300_000, 5_000_000)]
    assert [size for _, size in sizes] == ["small", "small", "small", "base", "base"]
    for config, _ in sizes:
        assert (config.model.norm, config.train.adam_beta2, config.train.label_smoothing) == ("post", 0.98, 0.1)
        assert config.train.warmup_steps <= max(1, config.train.max_steps // 5)
    short, _ = dial(40_000, 400_000, False, None, 500_000)
    assert (short.model.dropout, short.data.batch_tokens) == (0.1, 1024)


def test_fewer_steps_keep_the_peak_of_the_rate() -> None:
    config = override(RunConfig(), ["train.warmup_steps=4000"])
    short = with_steps(config, 100)

    def peak(config: RunConfig) -> float:
        train = config.train
        rates = [learning_rate(step, 512, train.warmup_steps) * train.rate_factor for step in range(1, 9000)]
        return max(rates)

    assert short.train.warmup_steps == 20
    assert peak(short) == pytest.approx(peak(config))
