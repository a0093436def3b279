"""The model learns: strings that training never saw are copied, reversed and reordered without a fault."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments.copy_task import LONGEST, Task, copy_task, draw, evaluate, train
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


def test_tasks_are_what_they_say() -> None:
    assert Task.copy.answer([3, 4, 5, 6]) == [3, 4, 5, 6]
    assert Task.reverse.answer([3, 4, 5, 6]) == [6, 5, 4, 3]
    assert Task.reorder.answer([3, 4, 5, 6, 7, 8]) == [5, 3, 4, 8, 6, 7]
    for n in range(LONGEST + 1):
        assert sorted(Task.reorder.answer(list(range(n)))) == list(range(n))


def test_training_never_draws_a_string_that_is_held_out() -> None:
    rng = random.Random(0)
    seen = {tuple(draw(rng, held_out=False)) for _ in range(20_000)}
    kept = {tuple(draw(rng, held_out=True)) for _ in range(2000)}
    assert not seen & kept
    assert any(len(ids) == 1 for ids in seen)  # short strings do come up, so the check above had something to find


def test_results_that_are_committed_were_perfect() -> None:
    files = sorted((Path(__file__).parent.parent / "experiments" / "results").glob("copy_task_*.json"))
    assert len(files) == len(Task)
    for file in files:
        result = json.loads(file.read_text())
        assert result["n_right"] == result["n_strings"], file.name
        config = RunConfig.from_json(json.dumps(result["config"]))  # settings that came later have their defaults
        assert config == copy_task(result["steps"]), f"{file.name} is stale"
