"""What holds for every command: help, examples, version, completion, one-line errors."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from transduce import __version__
from transduce.cli import app

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = dict(GROUP.commands)
TRANSDUCE = [str(Path(sys.executable).with_name("transduce"))]


def run(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRANSDUCE, *arguments],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_examples_that_its_parser_accepts(name: str) -> None:
    examples = re.findall(rf"transduce {name} ?(.*)", (COMMANDS[name].help or "").partition("Examples:")[2])
    assert len(examples) >= 2
    for example in examples:
        arguments = re.sub(r"[<>] \S+", "", example).split("   ")[0]
        words = shlex.split(arguments)
        COMMANDS[name].make_context(name, words, resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_has_a_help_text(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


def test_without_arguments_the_commands_are_listed_by_task() -> None:
    shown = run()
    assert shown.returncode == 2
    places = [shown.stdout.index(text) for text in ("─ Train a", "│ train ", "─ Use a", "│ translate ")]
    assert places == sorted(places)
    assert all(f"│ {name} " in shown.stdout for name in COMMANDS)
    assert all(command.rich_help_panel for command in app.registered_commands)


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"{__version__}\n"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in project
    assert f"\nversion: {__version__}\n" in (Path(__file__).parents[2] / "CITATION.cff").read_text()


def test_shell_completion_completes_commands_and_options() -> None:
    def completed(words: str, place: int) -> list[str]:
        shown = run(_TRANSDUCE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(place))
        return shown.stdout.split()

    assert completed("transduce tra", 1) == ["train", "translate"]
    assert "--alignments" in completed("transduce translate --al", 2)
    # `--show-completion` prints the same for the shell that it finds among the parents of the process.
    assert "complete -o default -F" in run(_TRANSDUCE_COMPLETE="source_bash").stdout


def test_an_unknown_option_is_one_line_and_exit_2() -> None:
    refused = run("translate", "--bean", "3")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("transduce: ")
    assert refused.stderr.count("\n") == 1
    assert "--beam" in refused.stderr, "the option that was meant is suggested"


def test_verbose_names_the_engine_and_the_reason() -> None:
    shown = run("translate", "--verbose", text="Ja.\n", CC="no-such-compiler", XDG_CACHE_HOME="/nonexistent")
    assert shown.returncode == 0
    assert re.search(r"^slower engine: cached \(.*\), float32: .*no-such-compiler", shown.stderr, re.MULTILINE)
    assert run("translate", "-v", "--device", "cpu", text="Ja.\n").stderr.count("engine: ") == 1


def test_a_slower_engine_is_reported_without_verbose_in_float32_too() -> None:
    shown = run("translate", text="Ja.\n", CC="no-such-compiler", XDG_CACHE_HOME="/nonexistent")
    assert shown.stderr.count("slower engine: cached") == 1


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_output_of_a_failing_compiler_is_reported_on_one_line(precision: str, tmp_path: Path) -> None:
    compiler = tmp_path / "failing-cc"
    compiler.write_text("#!/bin/sh\necho 'native.c:1:1: error: it is' >&2\necho '  broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    arguments = ["translate", "--quiet", "--device", "cpu", "--dtype", precision]
    shown = run(*arguments, text="Das ist gut.\n", CC=str(compiler), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert shown.stdout == "That's good.\n"
    (line,) = shown.stderr.splitlines()
    assert line.startswith("slower engine: cached (")
    assert line.endswith(f"{precision}: {compiler} failed: native.c:1:1: error: it is broken")
