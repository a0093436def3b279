"""Missing packages: the command that the error names installs them where `transduce` was installed from."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from transduce import extras
from transduce.errors import ConfigError
from transduce.interop.marian import to_marian

ROOT = Path(__file__).parents[1]


class Installed:
    """An installation with this content of direct_url.json, or without that file."""

    requires = metadata.requires("transduce")

    def __init__(self, origin: Any) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


def command(origin: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip installs for the extra `serve`, from this origin."""
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    shown = str(extras.missing("transduce serve", "uvicorn", "serve"))
    start, _, arguments = shown.partition(" install ")
    assert start == f"transduce serve needs the package uvicorn: {extras.pip()}"
    return shlex.split(arguments)


def test_from_a_folder_of_source_code_the_command_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    editable = {"url": ROOT.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.chdir(tmp_path)
    assert command(editable, monkeypatch) == ["-e", f"{ROOT}[serve]"]
    monkeypatch.chdir(ROOT)
    assert command(editable, monkeypatch) == ["-e", ".[serve]"]
    assert command({"url": ROOT.as_uri(), "dir_info": {}}, monkeypatch) == [".[serve]"]
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "pyproject.toml").touch()
    other = {"url": (tmp_path / "a folder").as_uri(), "dir_info": {}}
    assert command(other, monkeypatch) == [f"{tmp_path}/a folder[serve]"]


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "file:///gone/transduce-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://host/transduce.git", "vcs_info": {"vcs": "git"}},
        {"url": "file:///gone", "dir_info": {"editable": True}},
    ],
    ids=["an index", "a wheel", "a repository", "a folder that was removed"],
)
def test_from_elsewhere_the_command_names_the_packages_of_the_extra(
    monkeypatch: pytest.MonkeyPatch, origin: Any
) -> None:
    names = command(origin, monkeypatch)
    assert [name.partition(">")[0] for name in names] == ["fastapi", "python-multipart", "uvicorn", "uvloop"]
    assert all(name.partition(">=")[2].partition(";")[0].replace(".", "").isdecimal() for name in names)
    assert names[-1].partition("; ")[2] in ('platform_system == "Linux"', "platform_system == 'Linux'")


def test_a_source_tree_that_is_not_installed_is_named_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", fail)
    monkeypatch.chdir(tmp_path)
    assert extras.requirements_of("figures") == ["-e", f"{Path(extras.__file__).parents[2]}[figures]"]


def test_the_pip_is_that_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert extras.pip() == "pip"
    monkeypatch.setattr(shutil, "which", lambda name: f"/elsewhere/{name}")
    assert extras.pip() == f"{sys.executable} -m pip"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert extras.pip() == f"{sys.executable} -m pip"
    assert str(extras.missing("it", "tensorboard")).endswith("-m pip install tensorboard")


def test_a_converter_names_its_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"to_marian needs the package transformers: .* install .*export"):
        to_marian(None)  # type: ignore[arg-type]
