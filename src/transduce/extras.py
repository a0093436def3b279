"""Optional packages: the error if one is missing, with a command that installs it in this environment."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from transduce.errors import ConfigError


def missing(what: str, package: str, extra: str | None = None) -> ConfigError:
    """The error that `what` needs `package`. `extra`: our extra that contains it; None: the package alone is enough."""
    requirements = [package] if extra is None else requirements_of(extra)
    return ConfigError(f"{what} needs the package {package}: {pip()} install {shlex.join(requirements)}")


def pip() -> str:
    """The command of the pip that belongs to this interpreter, whose environment may not be active in the shell."""
    is_active = Path(shutil.which("pip") or "").parent == Path(sys.executable).parent
    return "pip" if is_active else f"{shlex.quote(sys.executable)} -m pip"


def requirements_of(extra: str) -> list[str]:
    """What pip must install for an extra.

    It is the folder of the source code with the extra if `transduce` was installed from one. Otherwise it is the
    packages of the extra: no index that has `transduce` is known.
    """
    folder, is_editable = source_folder()
    if folder is not None:
        place = "." if folder == Path.cwd() else str(folder)
        return [*(["-e"] if is_editable else []), f"{place}[{extra}]"]
    # A requirement of an extra reads: uvloop>=0.19; platform_system == "Linux" and extra == "serve"
    condition = re.compile(rf"(\s+and|;)\s*extra == ['\"]{extra}['\"]$")
    return [condition.sub("", one) for one in metadata.requires("transduce") or () if condition.search(one)]


def source_folder() -> tuple[Path | None, bool]:
    """The folder that `transduce` was installed from, and whether the installation is editable."""
    try:
        text = metadata.distribution("transduce").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return Path(__file__).parents[2], True
    origin = json.loads(text or "{}")
    folder = Path(url2pathname(urlsplit(origin.get("url", "")).path))
    if "dir_info" not in origin or not (folder / "pyproject.toml").is_file():
        return None, False
    return folder, bool(origin["dir_info"].get("editable"))
