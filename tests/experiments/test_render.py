from __future__ import annotations

import importlib.util
import re

from experiments.render import TABLES, at_a_glance, result


def test_the_short_table_of_results_shows_the_values_of_the_result_files() -> None:
    text = at_a_glance()
    runs = result("experiments/results/multi30k_h200.json")["runs"]
    bleu = [run["bleu"] for run in runs if (run["form"], run["direction"]) == ("tok", "en-de")]
    assert f"| {sum(bleu) / len(bleu):.2f} ± " in text
    (speed,) = re.findall(r"float32, two cores.*? \| ([\d,]+) \| [\d,]+ \(CTranslate2\)", text)
    speeds = result("benchmarks/results/translate_speed_small_cpu.json")["per_second"]["beam 4"]["ours (float32)"]
    assert f"{sorted(speeds)[len(speeds) // 2]:,.0f}" == speed


def test_the_short_table_of_results_names_commands_that_exist() -> None:
    modules = re.findall(r"`python -m ([\w.]+)", at_a_glance())
    assert len(modules) == at_a_glance().count("\n") - 1
    assert all(importlib.util.find_spec(module) for module in modules)


def test_each_table_can_be_rendered() -> None:
    for name, show in TABLES.items():
        assert show().startswith(("| ", "On ")), name
