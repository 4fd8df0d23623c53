"""The fenced blocks of a document, run as printed in a copy of the examples, against a real server.

``make serve`` starts ``layertap serve``; everything else runs in bash, with the server's port in place of 8000.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.server import CACHE

ROOT = Path(__file__).parents[2]
PRINTED_ADDRESS = "127.0.0.1:8000"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = re.compile(r'make serve(?: ARGS="(?P<words>[^"]*)")?\n')
LIMIT_S = 240
TRIES, TRY_S = 900, 0.2


@dataclass(frozen=True)
class Block:
    """A shell block of a document, and the block without a language that follows it: what it prints."""

    command: str
    output: str | None

    def matches(self, text: str) -> bool:
        """Whether a text begins as the document shows it, ``…`` standing for anything."""
        pattern = ".*?".join(re.escape(part.rstrip("\n")) for part in (self.output or "").split("…"))
        return re.match(pattern, text, re.DOTALL) is not None


def read_blocks(path: Path) -> list[Block]:
    """The shell blocks of a document in their order; blocks in other languages are passed over."""
    blocks: list[Block] = []
    shell = False
    for language, text in FENCED.findall(path.read_text(encoding="utf-8")):
        if language == "sh":
            blocks.append(Block(text, None))
        elif not language and shell:
            blocks[-1] = Block(blocks[-1].command, text)
        shell = language == "sh"
    return blocks


def read_diffs(path: Path) -> list[str]:
    """The diffs of a document in their order."""
    return [text for language, text in FENCED.findall(path.read_text(encoding="utf-8")) if language == "diff"]


@dataclass
class Project:
    """A folder that looks like the project's own to a reader: the examples, ``.venv`` and, once started, a server.

    Where the folder has sources of its own, commands run these.
    """

    path: Path
    _server: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _words: tuple[str, ...] = ()
    _port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def run(self, command: str) -> str:
        """Run a shell block as printed, the port aside, and give what it writes; one that fails is an error."""
        serve = SERVE.fullmatch(command)
        if serve:
            self.start(*(serve["words"] or "").split())
            return ""
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.replace(PRINTED_ADDRESS, self.url.removeprefix("http://"))],
            cwd=self.path,
            env=environment(LAYERTAP_URL=self.url, PYTHONPATH=str(self.path / "src")),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        return run.stdout

    def start(self, *words: str) -> None:
        """Start a server in the place of the one that runs, if that has other options, and wait until it is ready."""
        if self._server is not None and words == self._words:
            return
        self.stop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        command = [str(self.path / ".venv" / "bin" / "layertap"), "serve", "--port", str(self._port), *words]
        with (self.path / "serve.log").open("wb") as log:
            self._server = subprocess.Popen(command, cwd=self.path, env=environment(), stdout=log, stderr=log)
        self._words = words
        for _ in range(TRIES):
            if self._server.poll() is not None or self._is_ready():
                break
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(TRY_S)
        assert self._is_ready(), (self.path / "serve.log").read_text(encoding="utf-8")

    def stop(self) -> None:
        """End the server, if there is one, as Ctrl+C does."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(LIMIT_S)
            self._server = None

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process that has no settings but these, and leaves no grace to balancers at its end."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    return {**bare, "LAYERTAP_CACHE_DIR": str(CACHE), "LAYERTAP_DRAIN_DELAY_S": "0", "COLUMNS": "200", **variables}


def lay_out(path: Path) -> None:
    """Copy the examples into a folder, and put commands that stand for ``.venv`` beside them."""
    shutil.copytree(ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    commands = path / ".venv" / "bin"
    commands.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, words in (("python", ""), ("layertap", " -m layertap")):
        (commands / name).write_text(f'#!/bin/sh\nexec {python}{words} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)


@contextmanager
def open_project(path: Path) -> Iterator[Project]:
    """A project in a folder until the block ends, and its server with it."""
    lay_out(path)
    project = Project(path)
    try:
        yield project
    finally:
        project.stop()
