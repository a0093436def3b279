"""A command run in this process: a new one would spend a second and a half on imports."""

from __future__ import annotations

import sys

import pytest

from transduce.cli import main


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that it says when it exits with 2."""
    monkeypatch.setattr(sys, "argv", ["transduce", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    said = capsys.readouterr()
    assert (exited.value.code, said.out) == (2, ""), said
    (line,) = said.err.splitlines()
    return line.removeprefix("transduce: ")
