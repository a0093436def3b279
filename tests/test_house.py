"""The house keeps its shape: imports point one way, public names are few, README's code runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import transduce
from experiments.render import PAGES, made, rendered
from transduce.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transduce"

# Each may import what stands before its own line.
ORDER = [
    {"errors"},
    {"config", "files"},
    {"runtime"},
    {"data", "reference", "attention"},
    {"model", "search"},
    {"model_folder", "engines"},
    {"translation"},
    {"evaluation", "interop"},
    {"training"},
    {"insight", "paper_check"},
    {"serving"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
ONLY_INSIDE_FUNCTIONS = {"fastapi", "starlette", "uvicorn", "python_multipart"}
ONLY_INSIDE_FUNCTIONS |= {"matplotlib", "ctranslate2", "onnx", "onnxruntime", "ray", "tensorboard"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def part(path: Path) -> str:
    """`training` for training/recipe.py: a folder is one part of the house."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_of_transduce(tree: ast.AST) -> set[str]:
    return {name.split(".")[1] for name in imports(tree) if name.startswith("transduce.")} & RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = part(path)
    for other in parts_of_transduce(ast.parse(path.read_text())):
        assert other == here or RANK[other] < RANK[here], f"{here} must not import {other}"


def test_every_part_has_a_rank() -> None:
    assert {part(path) for path in MODULES} == RANK.keys()


def test_reference_and_model_never_meet_and_search_knows_no_model() -> None:
    for path in MODULES:
        found = parts_of_transduce(ast.parse(path.read_text()))
        assert not {"reference", "model"} <= found | {part(path)}, path
        if part(path) == "search":
            assert "model" not in found, path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_part_takes_another_through_the_front_door(path: Path) -> None:
    """`from transduce import Transformer` inside the package would pass by the order above."""
    tree = ast.parse(path.read_text())
    taken = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "transduce"
        for alias in node.names
    ]
    assert set(taken) <= {"__version__"}


def test_the_reference_is_numpy_alone() -> None:
    tree = ast.parse((PACKAGE / "reference.py").read_text())
    outside = {name.split(".")[0] for name in imports(tree)} - set(sys.stdlib_module_names) - {"transduce"}
    assert outside == {"numpy", "safetensors"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_packages_are_imported_inside_functions(path: Path) -> None:
    top = ast.Module([n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)], [])
    assert not {name.split(".")[0] for name in imports(top)} & ONLY_INSIDE_FUNCTIONS


def test_experiments_import_the_package_and_never_the_reverse() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not any(
            name.split(".")[0] in ("experiments", "benchmarks") for name in imports(ast.parse(path.read_text()))
        )


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_transduce_is_quick() -> None:
    """It loads nothing that takes seconds; and each public name then comes when asked for."""
    assert in_a_new_process("import sys, transduce; print({'torch', 'numpy', 'rich'} & sys.modules.keys())") == "set()"
    assert in_a_new_process("import transduce; print(transduce.Transformer.__name__)") == "Transformer"


PUBLIC = """
Batch ConfigError DataConfig DataError DecodeConfig DecoderState ModelConfig ModelFolderError RunConfig TrainConfig
Transformer Translation Translator base big greedy load_model make_batch override save_model small tiny with_model
"""


def test_public_names_are_these() -> None:
    assert transduce.__all__ == PUBLIC.split()
    for name in transduce.__all__:
        assert getattr(transduce, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = transduce.nothing


def test_all_versions_are_pinned_and_floors_are_floors() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in wanted:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(; platform_system == 'Linux')?", requirement), "floors only"
        assert requirement.split(">=")[0] in pins


def test_every_command_shows_examples_in_its_help() -> None:
    for command in app.registered_commands:
        text = command.callback.__doc__ if command.callback is not None else None
        assert f"transduce {command.name} " in (text or "").partition("Examples:")[2] + " ", command.name


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_code_runs_and_prints_what_it_says(code: str) -> None:
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert expected, "a comment after each print says what it prints"
    assert in_a_new_process(code).splitlines() == expected


def test_readme_has_the_tables_of_the_results() -> None:
    assert [page.relative_to(ROOT).as_posix() for page in PAGES] == ["README.md", "docs/tables.md"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert rendered(text) == text, f"{page.name}: python -m experiments.render"
    assert rendered("<!-- table: train-speed-cpu -->\n<!-- end of table -->").count("\n") > 6
    of_tables = PAGES[1].read_text(encoding="utf-8")
    for name in ("table1", "table2", "table3", "table3-asked", "gradient-norms"):
        assert f"<!-- table: {name} -->\n\n" in of_tables
    assert made("nowhere.json", "do it", str) == "No result yet: run `do it --out nowhere.json`."
    assert made("experiments/results/copy_task_copy.json", "do it", lambda found: found["experiment"]) == "copy_task"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_of_our_pages_are_there(page: Path) -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert pictures
    assert [name for name in pictures if not (page.parent / name).is_file()] == []


def test_readme_names_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert {"demo", "test"} <= set(re.findall(r"make ([\w-]+)", README))


@pytest.mark.parametrize("block", re.findall(r"```\n(\$ .*?)```", README, re.DOTALL))
def test_readme_shows_what_commands_print(block: str, tmp_path: Path) -> None:
    command, *shown = block.splitlines()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command.removeprefix("$ "), shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    printed = [" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()]
    for line in filter(str.strip, shown):
        assert line.strip() == "..." or " ".join(line.split()) in printed, line


def test_readme_links_to_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
