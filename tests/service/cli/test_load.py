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
    """Without a scenario it is that of ``digits``: every kind is told of, counts add up, and files are written."""
    figures, plot = tmp_path / "r.json", tmp_path / "r.svg"
    done = command("load", live.url, "--requests", "60", "--warmup", "3", "--json", figures, "--plot", plot)
    assert done.status == 0, done.notes
    assert all(name in done.out for name in ("three blocks mean npz", "openai embeddings", "200 × 60"))
    written = json.loads(figures.read_text())
    total, kinds = written["results"]["total"], written["results"]["kinds"]
    assert total["requests"] == 60 == sum(total["statuses"].values())
    assert total["requests"] == sum(each["requests"] for each in kinds.values())
    assert (written["breaches"], written["scenario"], "headers" in written["options"]) == ([], "digits", False)
    assert all(word in plot.read_text() for word in ("digits", "requests a second", "p99"))


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((), 1, "over budget: 40 of 40 requests failed, a share of 1; --max-error-rate allows 0"),
        (("--max-error-rate", "1"), 0, ""),
        (("--allow", "422"), 0, ""),
        (("--allow", "422", "--max-p99", "0.001"), 1, " ms; --max-p99 allows 0.001 ms"),
    ],
)
def test_budget(command: Command, live: Live, tmp_path: Path, words: tuple[str, ...], status: int, told: str) -> None:
    """Status 1 and one line on stderr for the part that is broken."""
    file = write(tmp_path, UNKNOWN)
    done = command("load", live.url, "--scenario", file, "--requests", "40", *words)
    breaches = [line for line in done.notes.splitlines() if line.startswith("over budget")]
    assert (done.status, len(breaches)) == (status, status)
    assert told in "".join(breaches)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((NOWHERE,), "no answer from http://127.0.0.1:1: "),
        (("nowhere",), "no answer from nowhere: Request URL is missing an 'http://' or 'https://' protocol"),
        (("http://name:secret@127.0.0.1",), "the URL holds a name or a password"),
        ((NOWHERE, "--rate", "5", "--connections", "5"), "give --rate or --connections, not both"),
        (
            (NOWHERE, "--scenario", "digit"),
            "there is no scenario 'digit' (a file, or one of digits, resnet50, trouble)",
        ),
        ((NOWHERE, "--plot", "nowhere/r.svg"), "there is no folder nowhere"),
        ((NOWHERE, "--plot", "r.html"), "--plot can't write .html"),
    ],
)
def test_mistakes(command: Command, words: tuple[str, ...], told: str) -> None:
    """Status 2 and one line, before anything is sent."""
    done = command("load", *words)
    assert (done.status, len(done.notes.splitlines()), done.out) == (2, 1, "")
    assert told in done.notes


def test_key(command: Command, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment, goes with every request and into no file."""
    figures, plot = tmp_path / "r.json", tmp_path / "r.svg"
    with serve(api_keys=("open-sesame",)) as guarded:
        words = ("load", guarded.url, "--requests", "3", "--json", figures, "--plot", plot)
        refused = command(*words)
        assert (refused.status, "set LAYERTAP_API_KEY" in refused.notes, figures.exists()) == (2, True, False)
        monkeypatch.setenv("LAYERTAP_API_KEY", "open-sesame")
        assert command(*words).status == 0
    assert json.loads(figures.read_text())["results"]["total"]["statuses"] == {"200": 3}
    assert "open-sesame" not in figures.read_text() + plot.read_text()
    monkeypatch.setenv("LAYERTAP_API_KEY", "open\nsesame")
    assert command(*words).status == 2


def test_without_what_servers_need(live: Live) -> None:
    """It runs, whole, where neither torch nor what speaks HTTP for a server can be imported."""
    code = WITHOUT.format(names=SERVER_ONLY)
    words = [sys.executable, "-c", code, "load", live.url, "--requests", "20"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "200 × 20" in done.stdout


@pytest.mark.slow
def test_interrupted(live: Live, tmp_path: Path) -> None:
    """Ctrl-C ends a run; what was done is printed and written."""
    file, figures, plot = write(tmp_path, GATED), tmp_path / "r.json", tmp_path / "r.svg"
    module = gated_module(live)
    module.forwards.clear()
    words = ["-m", "layertap", "load", live.url, "--scenario", file, "--duration", "120", "--json", figures]
    process = subprocess.Popen(
        [sys.executable, *map(str, words), "--plot", str(plot)],
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
    assert "interrupted" in out
    assert "Load: " in out
    results = json.loads(figures.read_text())["results"]
    assert results["interrupted"]
    assert results["total"]["statuses"].keys() == {"200"}
    assert "p99" in plot.read_text()
