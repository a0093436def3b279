"""The structure of the project: import order, public names, and documentation that is true."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import transduce
from experiments import reference
from experiments.render import PAGES, rendered, table_or_command

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transduce"

# Each layer may import only from the layers before it.
ORDER = [
    {"errors"},
    {"config", "extras", "files", "runtime"},
    {"data", "reference", "attention"},
    {"model", "search"},
    {"model_folder", "engines"},
    {"translation"},
    {"evaluation", "interop"},
    {"training"},
    {"insight", "paper_check"},
    {"serving"},
    {"cli"},
    {"commands"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
ONLY_INSIDE_FUNCTIONS = {"fastapi", "starlette", "uvicorn", "python_multipart"}
ONLY_INSIDE_FUNCTIONS |= {"matplotlib", "ctranslate2", "onnx", "onnxruntime", "ray", "tensorboard"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def part(path: Path) -> str:
    """`training` for training/recipe.py: a folder is one part."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_of_transduce(tree: ast.AST) -> set[str]:
    return {name.split(".")[1] for name in imports(tree) if name.startswith("transduce.")} & RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = part(path)
    for other in parts_of_transduce(ast.parse(path.read_text())):
        assert other == here or RANK[other] < RANK[here], f"{here} must not import {other}"


def test_every_part_has_a_rank() -> None:
    assert {part(path) for path in MODULES} == RANK.keys()


def test_the_architecture_page_has_the_same_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layers: list[set[str]] = [set() for _ in ORDER]
    for number, name in re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE):
        layers[int(number) - 1].add(name)
    assert [*layers[:-1], {"__main__"}] == ORDER


def test_reference_and_model_are_independent_and_search_does_not_import_the_model() -> None:
    for path in MODULES:
        parts = parts_of_transduce(ast.parse(path.read_text()))
        assert not {"reference", "model"} <= parts | {part(path)}, path
        if part(path) == "search":
            assert "model" not in parts, path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_of_the_package_imports_a_public_name_from_transduce(path: Path) -> None:
    """`from transduce import Transformer` inside the package would bypass the import order above."""
    tree = ast.parse(path.read_text())
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "transduce"
        for alias in node.names
    ]
    assert set(names) <= {"__version__"}


def test_the_reference_needs_only_numpy_and_safetensors() -> None:
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


def test_import_transduce_loads_no_heavy_package() -> None:
    """Each public name loads what it needs when it is first used."""
    assert in_a_new_process("import sys, transduce; print({'torch', 'numpy', 'rich'} & sys.modules.keys())") == "set()"
    assert in_a_new_process("import transduce; print(transduce.Transformer.__name__)") == "Transformer"


PUBLIC = """
Batch ConfigError DataConfig DataError DecodeConfig DecoderState Inspection ModelConfig ModelFolderError RunConfig
TrainConfig TrainedRun Transformer Translation Translator base big evaluate greedy inspect load_model make_batch
override prepare save_model small tiny train with_model
"""


PUBLIC_IN_MODULES = {
    "transduce.data.corpora": ["Corpus", "named_corpus"],
    "transduce.data.prepare": ["Prepared", "prepare"],
    "transduce.data.plan": ["Layout", "make_layout"],
    "transduce.data.batches": ["Batch", "Examples", "make_batch", "steps"],
    "transduce.data.trees": ["Tree", "linearise", "parse", "repair", "strip"],
    "transduce.evaluation.metrics": ["Comparison", "Score", "bleu", "chrf", "paired", "ter"],
    "transduce.insight.attention": ["AttentionRecord", "inspect"],
    "transduce.insight.embed": ["embed", "embed_stream", "similarity"],
    "transduce.interop": ["from_marian", "to_ctranslate2", "to_marian"],
}


def test_public_names_are_these() -> None:
    assert transduce.__all__ == PUBLIC.split()
    for name in transduce.__all__:
        assert getattr(transduce, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = transduce.nothing
    assert ("transduce", *PUBLIC_IN_MODULES) == reference.MODULES
    for module, names in PUBLIC_IN_MODULES.items():
        assert importlib.import_module(module).__all__ == names


@pytest.mark.parametrize("name", reference.public_names())
def test_every_public_name_has_a_docstring_with_an_example_that_runs(name: str) -> None:
    value: Any = reference.public_names()[name]
    text = inspect.getdoc(value) or ""
    assert ">>> " in text, f"{name} has no example"
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_the_api_reference_is_up_to_date() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m experiments.reference"


def test_all_versions_are_pinned_and_floors_are_floors() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["dev"][0] == "transduce[export,figures,serve]"
    requirements = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    names = [re.split(r"[>\[]", requirement)[0] for requirement in requirements]
    assert len(set(names)) == len(names), "no extra repeats another"
    for name, requirement in zip(names, requirements, strict=True):
        if name != "transduce":
            assert re.fullmatch(r"[\w-]+>=[\d.]+(; platform_system == 'Linux')?", requirement), "floors only"
            assert name in pins


PAGES_OF_TEXT = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES_OF_TEXT}
README = TEXTS["README.md"]


def blocks(pattern: str) -> list[Any]:
    """Each block of code that the pattern finds, with the page that it is on as its test's name."""
    return [
        pytest.param(name, code, id=f"{name}-{number}")
        for name, text in TEXTS.items()
        if name != "docs/reference.md"  # its examples are doctests
        for number, code in enumerate(re.findall(pattern, text, re.DOTALL))
    ]


@pytest.mark.parametrize(("page", "code"), blocks(r"```python\n(.*?)```"))
def test_code_in_the_documentation_runs_and_prints_what_it_says(page: str, code: str) -> None:
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert expected, "a comment after each print says what it prints"
    assert in_a_new_process(code).splitlines() == expected


ABOUT_THE_INSIDE = "docs/changing-the-model.md"


@pytest.mark.parametrize(
    ("page", "code"), [block for block in blocks(r"```python\n(.*?)```") if block.values[0] != ABOUT_THE_INSIDE]
)
def test_code_in_the_documentation_imports_only_public_names(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("transduce.") for alias in node.names), "write from ... import"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transduce":
            public = {"transduce": transduce.__all__, **PUBLIC_IN_MODULES}[node.module or ""]
            assert {alias.name for alias in node.names} <= set(public), node.module


@pytest.mark.parametrize(("page", "block"), blocks(r"```\n(\$ .*?)```"))
def test_the_documentation_shows_what_commands_print(page: str, block: str, tmp_path: Path) -> None:
    command, *shown = block.splitlines()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command.removeprefix("$ "), shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    printed = [" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()]
    for line in filter(str.strip, shown):
        assert line.strip() == "..." or " ".join(line.split()) in printed, line


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_pictures_of_the_documentation_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[name]):
        assert ((ROOT / name).parent / target).exists(), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        new |= {(page.parent / link).resolve() for link in links} - reached
    assert set(PAGES_OF_TEXT) <= reached


def test_the_readme_is_short_and_names_the_two_commands_that_set_everything_up() -> None:
    assert README.count("\n") < 200
    assert {"demo", "test"} <= set(re.findall(r"make ([\w-]+)", README))


@pytest.mark.parametrize("name", TEXTS)
def test_the_documentation_names_make_targets_that_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", TEXTS[name], re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target


def test_tables_in_the_documentation_are_rendered_from_results() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert rendered(text) == text, f"{page.name}: python -m experiments.render"
    with_tables = {name for name, text in TEXTS.items() if "<!-- table: " in text}
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} == with_tables
    assert "README.md" in with_tables
    assert rendered("<!-- table: train-speed-cpu -->\n<!-- end of table -->").count("\n") > 6
    for name in ("table1", "table2", "table3", "table3-extra", "gradient-norms"):
        assert f"<!-- table: {name} -->\n\n" in TEXTS["docs/tables.md"]
    assert table_or_command("nowhere.json", "do it", str) == "No result yet: run `do it --out nowhere.json`."
    path = "experiments/results/copy_task_copy.json"
    assert table_or_command(path, "do it", lambda result: result["experiment"]) == "copy_task"


# Phrases of the project's former dialect. The documentation and the code use plain English.
DIALECT = re.compile(
    r"nobody but|gives? nobody|for those who expect|seconds that a kind|whoever|comes? along\b"
    r"|that is no (?:run|number|model)"
    r"|is left to pytorch|of (?:its|his|their) own accord|without a word|what is (?:un)?wanted|where there is none"
    r"|take in no more|shall not|nobody more|not ours to",
    re.IGNORECASE,
)


def test_the_former_dialect_is_gone() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    texts = [f for f in files if Path(f).suffix in {".py", ".c", ".h", ".js", ".html", ".md", ".toml", ".yml", ""}]
    assert len(texts) > 200 or not (ROOT / ".git").exists()
    for name in texts:
        if name == "tests/test_house.py" or not (ROOT / name).is_file():
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            assert not DIALECT.search(line), f"{name}:{number}: {line.strip()}"
