"""The report of one or several training runs as one self-contained HTML file."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transduce import __version__
from transduce.config import base
from transduce.errors import ConfigError
from transduce.files import write_atomically
from transduce.insight.page import self_contained
from transduce.insight.report.run import about_run, require_run, settings_of
from transduce.training.journal import EndEvent, Event, OnEvent, ValidationEvent

REPORT, DATA_ID = "report.html", "report-data"


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the report of these runs as one HTML file, which replaces an older one."""
    write_atomically(out, report_of(runs))


def report_of(runs: Sequence[Path]) -> str:
    """The report of these runs as HTML. A run that is still training, was stopped or is incomplete has one too."""
    if not runs:
        raise ConfigError("there is no run to report on: give a folder that transduce train wrote")
    runs = list({run.resolve(): run for run in runs}.values())
    for run in runs:
        require_run(run)
    names = _names(runs)
    data = {
        "version": __version__,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [about_run(run, name) for run, name in zip(runs, names, strict=True)],
        "settings": compare_settings([settings_of(run) for run in runs]),
    }
    return self_contained("report.html", _text(f"{', '.join(names)} - Training report"), DATA_ID, plain(data))


def with_report(run: Path, on_event: OnEvent) -> OnEvent:
    """A callback for `train` that also writes the report of the run, into its folder, after each validation and at the
    end. A report that cannot be written does not end the training."""

    def record(event: Event) -> None:
        on_event(event)
        if isinstance(event, ValidationEvent | EndEvent):
            try:
                write_report([run], run / REPORT)
            except Exception as error:
                warnings.warn(f"the report was not written: {error}", RuntimeWarning, stacklevel=2)

    return record


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths where names are equal."""
    names = [run.resolve().name for run in runs]
    n_runs = Counter(names)
    return [name if n_runs[name] == 1 else str(run) for name, run in zip(names, runs, strict=True)]


def compare_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each setting: its values, that of the paper's base model, and whether values differ. A run without
    settings does not take part in the comparison."""
    papers = {
        f"{section}.{name}": value for section, values in asdict(base()).items() for name, value in values.items()
    }
    rows = []
    for name in dict.fromkeys(name for config in configs for name in config):
        known = [config[name] for config in configs if name in config]
        row = {
            "name": name,
            "values": [config.get(name) for config in configs],
            "is_known": [name in config for config in configs],
            "differ": any(value != known[0] for value in known[1:]),
        }
        if name in papers:
            row |= {"base": papers[name], "departs": any(value != papers[name] for value in known)}
        rows.append(row)
    return rows


def plain(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinity become None, and half a surrogate pair a question mark."""
    match value:
        case str():
            return _text(value)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {_text(str(key)): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
