"""``load``: the command, its exit status, its files, and what it needs to run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import ROOT, Command
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, wait_until
from tests.service.load.entries import GATED, NOWHERE, UNKNOWN
from tests.service.support import Json

SERVER_ONLY = ("fastapi", "starlette", "timm", "torch", "torchvision", "transformers", "uvicorn")
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({names!r}))
from layertap.service.cli.main import main
main()
"""


def write(folder: Path, *entries: Json) -> Path:
    """A scenario on disk."""
    file = folder / "scenario.yaml"
    file.write_text(json.dumps(entries))
    return file


def test_built_in(command: Command, live: Live, tmp_path: Path) -> None:
    """The default scenario is ``digits``. The report lists every kind, its counts add up, and the file is written."""
    figures = tmp_path / "r.json"
    done = command("load", live.url, "--rate", "50", "--duration", "1", "--json", figures)
    assert done.status == 0, done.notes
    assert all(f"\n{name}: " in f"\n{done.out}" for name in ("three blocks mean npz", "openai embeddings", "total"))
    written = json.loads(figures.read_text())
    total, *kinds = (written["results"].pop(name) for name in ("total", *written["results"].keys() - {"total"}))
    assert total["outcomes"] == {"200": total["requests"]}
    assert total["requests"] == sum(each["requests"] for each in kinds) > 20
    assert f"0 of {total['requests']} failed" in done.out
    assert (written["breaches"], written["scenario"]) == ([], "digits")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((), 1, " requests failed; --max-error-rate is 0"),
        (("--max-error-rate", "1"), 0, ""),
        (("--allow", "422"), 0, ""),
        (("--allow", "422", "--max-p99", "0.001"), 1, " ms; --max-p99 is 0.001 ms"),
    ],
)
def test_budget(command: Command, live: Live, tmp_path: Path, words: tuple[str, ...], status: int, told: str) -> None:
    """Status 1 and one line on stderr for the part that is broken."""
    file = write(tmp_path, UNKNOWN)
    done = command("load", live.url, "--scenario", file, "--rate", "100", "--duration", "0.2", *words)
    breaches = [line for line in done.notes.splitlines() if line.startswith("over budget")]
    assert (done.status, len(breaches)) == (status, status)
    assert told in "".join(breaches)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((NOWHERE,), "no server answers at http://127.0.0.1:1"),
        (("nowhere",), "'nowhere' is no address of a server"),
        (
            (NOWHERE, "--scenario", "digit"),
            "there is no scenario 'digit' (a file, or one of digits, resnet50, trouble)",
        ),
    ],
)
def test_mistakes(command: Command, words: tuple[str, ...], told: str) -> None:
    """Status 2 and one line, before anything is sent."""
    done = command("load", *words)
    assert (done.status, len(done.notes.splitlines()), done.out) == (2, 1, "")
    assert told in done.notes


def test_key(command: Command, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment, goes with every request and into no file."""
    figures = tmp_path / "r.json"
    with serve(api_keys=("open-sesame",)) as guarded:
        words = ("load", guarded.url, "--duration", "0.5", "--json", figures)
        refused = command(*words)
        assert (refused.status, "set LAYERTAP_API_KEY" in refused.notes, figures.exists()) == (2, True, False)
        monkeypatch.setenv("LAYERTAP_API_KEY", "open-sesame")
        assert command(*words).status == 0
    assert json.loads(figures.read_text())["results"]["total"]["outcomes"].keys() == {"200"}
    assert "open-sesame" not in figures.read_text()
    monkeypatch.setenv("LAYERTAP_API_KEY", "open\nsesame")
    assert command(*words).status == 2


def test_without_what_servers_need(live: Live) -> None:
    """It runs, whole, where neither torch nor what speaks HTTP for a server can be imported."""
    code = WITHOUT.format(names=SERVER_ONLY)
    words = [sys.executable, "-c", code, "load", live.url, "--duration", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "; 200 × " in done.stdout


@pytest.mark.slow
def test_interrupted(live: Live, tmp_path: Path) -> None:
    """Ctrl-C ends a run; what was done is printed and written."""
    file, figures = write(tmp_path, GATED), tmp_path / "r.json"
    module = gated_module(live)
    module.forwards.clear()
    words = ["-m", "layertap", "load", live.url, "--scenario", file, "--duration", "120", "--json", figures]
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            wait_until(lambda: len(module.forwards) >= 20 or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            out, notes = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, notes
    assert "total: " in out
    assert json.loads(figures.read_text())["results"]["total"]["outcomes"].keys() == {"200"}
