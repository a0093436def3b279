"""A person who has never seen the program: the wheel in a clean environment, two plain files, and a busy machine.

Everything must work at the first attempt: train in a given time, read the report, translate, serve, resume, tune.
"""

from __future__ import annotations

import lzma
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.load import busy_cores
from transduce.data.corpora import BUNDLED

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
BUDGET = 180.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a clean environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT), cwd=folder)
    (wheel,) = folder.glob("transduce-*.whl")
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    programs = folder / "venv" / "bin"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run(str(programs / "pip"), "install", "-q", *constraints, f"{wheel}[serve]", cwd=folder)
    return programs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two plain files, as people have them."""
    folder = tmp_path_factory.mktemp("files")
    with lzma.open(BUNDLED, "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").split("\t") for line in lines]
    for name, column in (("text.de", 0), ("text.en", 1)):
        (folder / name).write_text("".join(pair[column] + "\n" for pair in pairs), encoding="utf-8")
    return folder


def run(*command: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def trained(environment: Path, files: Path) -> tuple[Path, float, str]:
    """The folder with the run, the seconds that training took, and its messages."""
    began = time.monotonic()
    with busy_cores():
        done = run(
            str(environment / "transduce"), "train", "text.de", "text.en", "--out", "run", "--budget", "3m", cwd=files
        )
    return files, time.monotonic() - began, done.stderr + done.stdout


def test_training_keeps_its_budget_on_a_busy_machine(trained: tuple[Path, float, str]) -> None:
    folder, seconds, messages = trained
    assert seconds == pytest.approx(BUDGET, rel=0.1), messages
    assert (folder / "run" / "model").is_dir()
    assert "measuring the speed of this machine" in messages


def test_the_report_opens_in_a_browser(trained: tuple[Path, float, str], browser: Browser) -> None:
    folder, _, messages = trained
    report = folder / "run" / "report.html"
    assert str(Path("run") / "report.html") in messages
    tab, problems = browser.new_page(), list[str]()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
    tab.goto(report.as_uri())
    assert tab.locator("svg").count() > 0
    assert not problems
    tab.close()


def test_the_model_translates_and_is_served(trained: tuple[Path, float, str], environment: Path) -> None:
    folder = trained[0]
    done = run(str(environment / "transduce"), "translate", "run", cwd=folder, stdin="Das ist gut.\n\n")
    assert done.stdout.count("\n") == 2
    command = [str(environment / "transduce"), "serve", "run", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = next(line.split()[-1] for line in server.stderr if line.startswith("serving at "))
            with urllib.request.urlopen(url, timeout=30) as page:
                assert b"<title>" in page.read()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0


def test_a_stopped_run_is_resumed_and_tuned(trained: tuple[Path, float, str], environment: Path) -> None:
    folder = trained[0]
    train = [str(environment / "transduce"), "train", "text.de", "text.en", "--out", "second"]
    train += ["--size", "tiny", "--set", "train.max_steps=60", "--set", "train.checkpoint_steps=20"]
    with subprocess.Popen(train, cwd=folder, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "validation perplexity" in line:
                first.send_signal(signal.SIGINT)
                break
        messages = first.stderr.read()
        assert first.wait(timeout=60) == 2
    assert "run the same command to resume" in messages
    assert "resumed from step" in run(*train, cwd=folder).stderr
    tune = [str(environment / "transduce"), "train", "text.de", "text.en", "--from", "second", "--out", "tuned"]
    done = run(*tune, "--set", "train.max_steps=20", "--set", "train.checkpoint_steps=10", cwd=folder)
    assert "step 0: validation perplexity" in done.stderr


NOTEBOOK = """
import transduce
run = transduce.train("text.de", "text.en", out="from-notebook", size="tiny", budget="45s")
---
run
---
run.translator.translate("Das ist gut.").text
---
transduce.inspect(run.folder, "Das ist gut.")
"""


def test_the_same_works_in_a_notebook(files: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(code.strip()) for code in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with busy_cores():
        NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(files)}}
        ).execute()
    training, report, translation, inspection = (cell["outputs"] for cell in notebook.cells)
    assert "validation perplexity" in "".join(output.get("text", "") for output in training)
    for outputs in (report, inspection):
        (output,) = outputs
        assert output["data"]["text/html"].startswith("<iframe")
    assert translation[0]["data"]["text/plain"].startswith(("'", '"'))
