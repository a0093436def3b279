"""A command run in this process: a new one would spend a second and a half on imports."""

from __future__ import annotations

import sys

import pytest

from transduce.cli import main


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str, str]:
    """How it ended, and what it said on stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["transduce", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    said = capsys.readouterr()
    return exited.value.code, said.out, said.err


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that it says when it exits with 2."""
    code, out, err = run_here(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    return line.removeprefix("transduce: ")
