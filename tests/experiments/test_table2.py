"""Table 2: the paper's runs have its settings, costs are counted, and our runs are trained, resumed and shown."""

from __future__ import annotations

import json
import lzma
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments import bundled_model, runs, table2
from experiments.flops import Lengths, counted, estimated_flops
from experiments.published import BEST, EN_FR, EN_FR_BIG, TABLE_2, TRAINING
from experiments.runs import run_in_parallel, settings_from, shares_of_cores, train_config
from experiments.table2 import CORPORA, PAPER_RUNS, PaperRun, commands_for
from tests.support.command import run_here
from tests.support.pairs import sentences
from tests.support.primes import prime_config
from transduce import Transformer, base, big, override, small, tiny, with_model
from transduce.data.prepare import Prepared
from transduce.paper_check import check_paper
from transduce.training import run as training_run
from transduce.training.request import Request, check_request
from transduce.training.settle import Settled, resolve_config
from transduce.training.trainer import Trainer

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
# The paper's runs


def test_the_papers_runs_have_the_papers_settings() -> None:
    for name, paper in PAPER_RUNS.items():
        assert paper.differences() == [], name
        different = {
            row.setting: row.ours for row in check_paper(paper.config(), paper.size) if row.verdict == "differs"
        }
        assert different == paper.stated, "En-Fr differs from En-De only in the settings that the paper states for it"
    trains = {name: paper.config().train for name, paper in PAPER_RUNS.items()}
    assert {name: (train.max_steps, train.average_last) for name, train in trains.items()} == {
        "en_de_base": (100_000, 5),
        "en_fr_base": (100_000, 5),
        "en_de_big": (300_000, 20),
        "en_fr_big": (300_000, 20),
    }
    assert [paper.config().model.dropout for paper in PAPER_RUNS.values()] == [0.1, 0.3, 0.1, 0.1]
    assert [paper.config().model.source_vocab_size for paper in PAPER_RUNS.values()] == [37_000, 37_000, 32_000, 32_000]


def test_a_departure_from_the_paper_is_found() -> None:
    def differing(*settings: str, stated: dict[str, Any]) -> list[str]:
        return [
            row.setting for row in PaperRun(lambda: override(big(), settings), "big", "en-fr", stated).differences()
        ]

    assert differing("train.adam_beta2=0.997", stated={}) == ["train.adam_beta2"]
    wrong_vocabulary = [f"{name}=30000" for name in EN_FR]
    assert differing(*wrong_vocabulary, "model.dropout=0.1", stated=EN_FR_BIG) == list(EN_FR)


@pytest.mark.parametrize("name", list(PAPER_RUNS))
def test_the_printed_commands_run_the_papers_configuration(
    name: str, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table2.main(["--print", name])
    printed = capsys.readouterr().out
    assert "differences from the paper: nothing" in printed
    lines = printed.splitlines()
    vocabulary = PAPER_RUNS[name].config().model.source_vocab_size
    assert any(line.startswith("transduce prepare ") and f"--vocab-size {vocabulary} " in line for line in lines)
    (alone,) = (shlex.split(line) for line in lines if line.startswith("transduce train "))
    (several,) = (shlex.split(line) for line in lines if line.startswith("torchrun "))
    started: list[Any] = []

    def start_ranks(n_ranks: int, arguments: list[str]) -> int:
        started.append((n_ranks, arguments))
        return 0

    monkeypatch.setattr(training_run, "start_ranks", start_ranks)
    assert run_here(monkeypatch, capsys, *alone[1:])[0] == 0
    assert started == [(8, alone[1:])], "eight processes of the same command"
    assert several[several.index("transduce") + 1 :] == alone[1:-2], (
        "the same command as on one machine, without --devices"
    )
    settings = [alone[place + 1] for place, word in enumerate(alone) if word == "--set"]
    request = Request(prepared=str(prepared_folder), size=alone[alone.index("--size") + 1], settings=settings)
    config, _ = resolve_config(request, Prepared(prepared_folder), None)
    assert config == with_model(PAPER_RUNS[name].config(), source_vocab_size=300, target_vocab_size=300)


@pytest.mark.slow
def test_a_printed_command_runs_under_torchrun(prepared_folder: Path, tmp_path: Path) -> None:
    """With two processes on a CPU and smaller sizes; everything else is as printed."""
    (line,) = (line for line in commands_for("en_fr_big").splitlines() if line.startswith("transduce train "))
    words = shlex.split(line)
    words[words.index("--out") + 1], words[words.index("--devices") + 1] = str(tmp_path / "run"), "2"
    words[2] = str(prepared_folder)
    sizes = ["model.d_model=32", "model.d_ff=64", "model.d_k=4", "model.d_v=4", "data.batch_tokens=300"]
    for setting in [*sizes, "train.max_steps=3", "train.valid_translations=0"]:
        words += ["--set", setting]
    subprocess.run([sys.executable, "-m", *words, "--device", "cpu", "--quiet"], check=True)
    settled = Settled.from_json((tmp_path / "run" / "run.json").read_text())
    assert settled.about["n_ranks"] == 2
    assert (settled.config.model.dropout, settled.config.train.average_last) == (0.1, 20)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3


# Costs


def test_estimated_flops_of_the_papers_runs_are_those_that_it_prints() -> None:
    printed = {cost.name: cost.en_de_flops for cost in TABLE_2}
    for size, cost in TRAINING.items():
        flops = estimated_flops(cost.hours * 3600, cost.n_gpus, cost.device)
        assert f"{flops:.1e}" == f"{printed[f'Transformer ({size})']:.1e}", size
    assert estimated_flops(60, 1, "cpu, 1 threads") is None


@pytest.mark.parametrize(
    "changes", [{}, {"d_k": 3, "n_heads": 2}, {"tied_embeddings": "none", "target_vocab_size": 43}]
)
def test_counted_flops_are_those_that_pytorch_counts(changes: dict[str, Any]) -> None:
    config = prime_config(**changes)
    model = Transformer(config)
    lengths_N2 = np.array([[29, 31]] * 3, dtype=np.int32)
    source_BS, target_BT = (torch.randint(3, 37, (3, n)) for n in (29, 31))  # no padding
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(source_BS, target_BT).logits_BTV.sum().backward()
    assert counter.get_total_flops() == counted(config, Lengths.of(lengths_N2[:, 0], lengths_N2[:, 1]))


# Ours


def test_settings_from_reproduces_a_configuration() -> None:
    for corpus in CORPORA.values():
        config = corpus.config()
        settings = settings_from(config, base())
        assert override(with_model(base(), **vocabulary_of(config)), settings) == config


def vocabulary_of(config: Any) -> dict[str, int]:
    return {f"{side}_vocab_size": getattr(config.model, f"{side}_vocab_size") for side in ("source", "target")}


def write_packed(folder: Path, name: str, n: int, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(("de", "en")):
        lines = "".join(pair[side] + "\n" for pair in sentences(n, seed))
        (folder / f"{name}.{language}.xz").write_bytes(lzma.compress(lines.encode()))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for n, (name, size) in enumerate([("train", 400), ("dev", 30), ("test", 12)]):
        write_packed(folder / "europarl-de-en", name, size, n)
    write_packed(folder / "newstest" / "de-en", "newstest2014", 12, 5)
    write_packed(folder / "tatoeba-en-de", "all", 500, 6)
    return folder


TOY = [
    "model.n_encoder_layers=1",
    "model.n_decoder_layers=1",
    "model.d_model=32",
    "model.d_ff=64",
    "model.d_k=4",
    "model.d_v=4",
    "data.batch_tokens=500",
    "train.max_steps=6",
    "train.checkpoint_steps=2",
    "train.average_last=2",
    "decode.max_extra_tokens=3",
]


def test_the_command_trains_and_scores_and_prints_the_table(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_model, "N_HELD_OUT", 20)
    monkeypatch.setattr(bundled_model, "VOCABULARY", 300)
    work, out = tmp_path / "work", tmp_path / "table2.json"
    command = ["--data", str(data), "--work", str(work), "--out", str(out), "--vocabulary", "300", "--device", "cpu"]
    command += ["--set", *TOY, "--run", "tatoeba", "europarl"]
    table2.main(command)
    tatoeba, europarl = json.loads(out.read_text())["runs"]
    assert europarl["scores"].keys() == {"newstest2014", "Europarl, held out"}
    assert tatoeba["scores"]["Tatoeba, held out"]["n_sentences"] == 20
    for run in (tatoeba, europarl):
        assert (run["steps"], run["seed"], run["config"]["model"]["dropout"] > 0.1) == (6, 1, True)
        for score in run["scores"].values():
            assert score["search"] == "beam 4, length penalty 0.6"
            assert score["signature"].startswith("nrefs:1|")
            assert score["interval"][0] <= score["bleu"] <= score["interval"][1]
        assert run["flops_counted"] > 6 * 6 * 200 * 32 * 300, "more than the vocabulary's share of six steps"
        assert {"config_hash", "commit", "device", "minutes", "tokens_per_second"} <= run.keys()
    assert list((work / "runs").iterdir()) == [], "the folder of a run is removed when its result is written"
    capsys.readouterr()
    monkeypatch.setattr(table2, "run_one", lambda *_: pytest.fail("this run is already in the result"))
    table2.main([*command, "--multi30k", str(RESULTS / "multi30k_h200.json")])
    shown = capsys.readouterr().out
    assert "| europarl, de-en | newstest2014 | 0.0 | beam 4, length penalty 0.6 |" in shown
    assert f"| {BEST['europarl', 'newstest2014', 'de-en'].bleu} |" in shown
    assert "| multi30k tok, en-de | test_2016_flickr |" in shown
    assert "`nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:none|smooth:exp|version:2.6.0`" in shown


def test_a_budget_replaces_the_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each corpus has a number of steps, and the trainer refuses a request with both."""
    requests: list[Request] = []

    class Enough(Exception):
        """The request is made, and the test is over."""

    def train(folder: Path, request: Request, *_: Any) -> None:
        requests.append(request)
        raise Enough

    monkeypatch.setattr(runs, "train", train)
    config = override(small(), ["train.max_steps=7"])
    for budget in (None, "9m"):
        with pytest.raises(Enough):
            train_config(tmp_path / "run", tmp_path, config, device="cpu", budget=budget)
        check_request(requests[-1])
    assert ["train.max_steps=7" in request.settings for request in requests] == [True, False]


def test_an_interrupted_run_is_resumed(prepared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(CORPORA["europarl"].config(), [*TOY, "train.seed=3"])
    take_step_of_trainer, n_steps = Trainer.take_step, 0

    def take_step(trainer: Any, step: int, share: Any) -> None:
        nonlocal n_steps
        if trainer.state.losses:  # the state has no losses while the trainer measures its speed
            n_steps += 1
            if n_steps == 3:
                raise KeyboardInterrupt
        take_step_of_trainer(trainer, step, share)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_step)
        with pytest.raises(KeyboardInterrupt):
            train_config(tmp_path / "run", prepared_folder, config, device="cpu")
    done = train_config(tmp_path / "run", prepared_folder, config, device="cpu")
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [4]
    assert done.result["steps"] == 6


def test_the_table_shows_the_result_of_multi30k() -> None:
    result = json.loads((RESULTS / "multi30k_h200.json").read_text())
    shown = table2.table([], result)
    bleu = [run["bleu"] for run in result["runs"] if (run["form"], run["direction"]) == ("tok", "en-de")]
    mean, spread = float(np.mean(bleu)), float(np.std(bleu, ddof=1))
    (line,) = (line for line in shown.splitlines() if line.startswith("| multi30k tok, en-de |"))
    assert f"| {mean:.2f} ± {spread:.2f} | 3 |" in line
    assert line.endswith("| 41.02 |")
    assert "| beam 5, length penalty 0.6 |" in line
    assert "41.02, fairseq" in shown
    assert "| Transformer (base) | 27.3 | 38.1 | 3.3e+18 | 3.3e+18 |" in shown


def test_runs_on_a_cpu_have_a_row_of_their_own_and_do_not_share_minutes() -> None:
    """Simultaneous runs share a GPU, but not CPU cores. All sizes are compared with the same published score."""
    run = {
        "corpus": "europarl",
        "direction": "de-en",
        "parameters": 7e6,
        "minutes": 30.0,
        "beside": 2,
        "seed": 1,
        "tokens_per_second": 5e3,
        "flops_counted": 1e15,
        "device": "cpu, 1 threads",
        "scores": {"newstest2014": {"bleu": 12.5, "interval": [12, 13], "signature": "s", "search": "beam 4"}},
    }
    results = [{"runs": [run]}, {"runs": [run | {"device": "NVIDIA H200", "corpus": "europarl-big"}]}]
    on_cpu, on_gpu = (line for line in table2.table(results).splitlines() if line.startswith("| europarl"))
    assert "| 12.50 (12.0 to 13.0) | 1 | cpu, 1 threads | 30.0 | 5,000 |  | 1.0e+15 | 30.51 |" in on_cpu
    assert "| 1 | NVIDIA H200 | 15.0 |" in on_gpu
    assert on_gpu.endswith("| 30.51 |")


# Parallel runs and settings


def test_a_failed_job_does_not_stop_the_others() -> None:
    records: list[dict[str, int]] = []

    def collect() -> None:
        for _, record in run_in_parallel(1, json.loads, ['{"a": 1}', "nonsense", '{"b": 2}']):
            records.append(record)

    with pytest.raises(json.JSONDecodeError):
        collect()
    assert records == [{"a": 1}, {"b": 2}]


def test_no_job_starts_after_the_time_limit() -> None:
    assert list(run_in_parallel(1, json.loads, ["{}"], minutes=-1)) == []
    assert list(run_in_parallel(1, json.loads, ["{}"], minutes=1)) == [("{}", {})]


START = """
from experiments.runs import run_in_parallel
from tests.experiments.test_table2 import write_pid_and_wait
if __name__ == "__main__":
    list(run_in_parallel(1, write_pid_and_wait, ["{place}"]))
"""


def write_pid_and_wait(place: str) -> dict[str, Any]:
    Path(place).write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def test_a_run_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    """Also if the command is killed and cannot signal its children."""
    place = tmp_path / "pid"
    command = subprocess.Popen([sys.executable, "-c", START.format(place=place)])
    wait_until(lambda: place.exists() and place.read_text() != "")
    run = int(place.read_text())
    assert is_running(run)
    command.kill()
    command.wait()
    wait_until(lambda: not is_running(run))


def wait_until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")  # a zombie process has ended
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def cores_of(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)  # long enough for the jobs to overlap
    return {"cores": sorted(os.sched_getaffinity(0)), "n_threads": torch.get_num_threads()}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
@pytest.mark.parametrize("n", [1, 2])
def test_simultaneous_runs_use_disjoint_cores(n: int) -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    records = [record for _, record in run_in_parallel(n, cores_of, [1.0] * 3)]
    cores_of_runs = [record["cores"] for record in records]
    n_threads = torch.get_num_threads()
    assert [record["n_threads"] for record in records] == [min(n_threads, len(cores)) for cores in cores_of_runs]
    assert len(cores_of_runs) == 3
    if n == 1 or len(all_cores) == 1:
        assert cores_of_runs == [all_cores] * 3
    else:
        shares = sorted({tuple(cores) for cores in cores_of_runs})
        assert sorted(core for share in shares for core in share) == all_cores, "each core is in exactly one share"


def test_more_runs_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert shares_of_cores(5) == [{3}, {5}, {3}, {5}, {3}]
    assert shares_of_cores(1) == [{3, 5}]


def test_settings_from_lists_all_differences() -> None:
    changed = replace(with_model(base(), norm="pre", attention_window=5), decode=replace(base().decode, beam_size=7))
    assert settings_from(changed, base()) == ["model.norm=pre", "model.attention_window=5", "decode.beam_size=7"]
    assert settings_from(base(), changed) == ["model.norm=post", "model.attention_window=None", "decode.beam_size=4"]
    assert override(changed, settings_from(base(), changed)) == base()
    assert settings_from(tiny(), with_model(tiny(), source_vocab_size=300, target_vocab_size=300)) == []
