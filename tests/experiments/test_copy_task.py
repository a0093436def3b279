"""The model learns to copy, map, reorder and reverse strings that training does not contain, without any error."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import typer

from experiments import copy_task as module
from experiments.copy_task import FIRST_LETTER_ID, LETTERS, LONGEST, Task, copy_task, draw, evaluate, text, train
from transduce import RunConfig


@pytest.mark.slow
@pytest.mark.parametrize("task", list(Task))
def test_the_task_is_learnt_to_a_perfect_score(task: Task) -> None:
    losses: list[float] = []
    config = copy_task()
    model = train(task, config, "cpu", lambda _, loss: losses.append(loss))
    score = evaluate(model, task, config, "cpu")
    assert losses[0] > 2 * losses[-1]
    assert (score.n_right, score.n_strings) == (1000, 1000)


def test_the_answers_of_the_tasks() -> None:
    assert Task.copy.answer([3, 4, 5, 6]) == [3, 4, 5, 6]
    assert Task.reverse.answer([3, 4, 5, 6]) == [6, 5, 4, 3]
    assert Task.reorder.answer([3, 4, 5, 6, 7, 8]) == [5, 3, 4, 8, 6, 7]
    alphabet = range(FIRST_LETTER_ID, FIRST_LETTER_ID + len(LETTERS))
    assert (
        text(Task.map.answer([*alphabet, FIRST_LETTER_ID])) == "qwertyuiopasdfghjklzxcvbnmq"
    )  # the committed result uses this mapping
    for n in range(LONGEST + 1):
        assert sorted(Task.reorder.answer(list(range(n)))) == list(range(n))


def test_mapping_is_a_permutation_without_a_fixed_letter() -> None:
    letters = list(range(FIRST_LETTER_ID, FIRST_LETTER_ID + len(LETTERS)))
    mapped = Task.map.answer(letters)
    assert sorted(mapped) == letters
    assert all(a != b for a, b in zip(letters, mapped, strict=True))
    # With one distance for all letters, the mapping would be a shift of the alphabet.
    assert len({(b - a) % len(LETTERS) for a, b in zip(letters, mapped, strict=True)}) > len(LETTERS) / 2


def test_all_runs_every_task_in_order_and_writes_one_result_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "evaluate", partial(evaluate, n_strings=3))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # other tests need the original number
    monkeypatch.setattr(module, "show", lambda *_: None)  # slow, because an untrained model never ends a string
    with pytest.raises(typer.Exit) as ended:
        module.main(task="all", steps=1, out=tmp_path / "results")
    assert ended.value.exit_code == 1  # one step is not enough to learn the task
    printed = capsys.readouterr().out
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("Learning")] == [
        "copy",
        "map",
        "reorder",
        "reverse",
    ]
    for task in Task:
        result = json.loads((tmp_path / "results" / f"copy_task_{task}.json").read_text())
        assert (result["task"], result["n_strings"], result["steps"]) == (task, 3, 1)
        assert result["config_hash"] == copy_task(1).hash()


def test_all_refuses_a_file_and_an_unknown_task_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="name a folder"):
        module.main(task="all", steps=1, out=Path("one.json"))
    with pytest.raises(typer.BadParameter, match="copy, map, reorder, reverse, or all"):
        module.main(task="shuffle", steps=1)


def test_training_never_draws_a_held_out_string() -> None:
    rng = random.Random(0)
    seen = {tuple(draw(rng, held_out=False)) for _ in range(20_000)}
    held_out = {tuple(draw(rng, held_out=True)) for _ in range(2000)}
    assert not seen & held_out
    assert any(len(ids) == 1 for ids in seen)  # short strings occur, so both sets could overlap


def test_committed_results_are_perfect() -> None:
    files = sorted((Path(__file__).parents[2] / "experiments" / "results").glob("copy_task_*.json"))
    assert len(files) == len(Task)
    for file in files:
        result = json.loads(file.read_text())
        assert result["n_right"] == result["n_strings"], file.name
        config = RunConfig.from_json(json.dumps(result["config"]))  # newer settings have their defaults
        assert config == copy_task(result["steps"]), f"{file.name} is outdated"
