"""Runs a command in this process. A new process would need a second and a half for imports."""

from __future__ import annotations

import sys

import pytest

from transduce.cli import main


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str, str]:
    """The exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["transduce", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr()
    return exited.value.code, output.out, output.err


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that exits with 2. It must be a single line."""
    code, out, err = run_here(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    return line.removeprefix("transduce: ")
