"""The fenced blocks of a document, run as printed in a copy of the examples, against a real server.

``make serve`` starts a server. ``layertap`` and the scripts of the examples run in this process, where torch is
imported once, everything else in bash, with the server's port in place of 8000.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from layertap.service.config.configuration import read_configuration
from tests.server import CACHE, serving
from tests.service.cli.commands import Done, run_here

ROOT = Path(__file__).parents[2]
PRINTED_ADDRESS = "127.0.0.1:8000"
OF_WORKERS = frozenset({"out/tiny/clips.yaml"})  # configurations of pages that send what workers alone decode
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = re.compile(r'make serve(?: ARGS="(?P<words>[^"]*)")?\n')
PLAIN = re.compile(r"^(\.venv/bin/(?:layertap|python [^-\s]\S*) [^|<>&;$\\\n]*)$", re.MULTILINE)  # needs no shell
LIMIT_S = 240


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

    Where it has sources of its own, every command is a process, which has these.
    """

    path: Path
    own_sources: bool = False
    url: str = ""
    _words: str | None = None
    _server: ExitStack = field(default_factory=ExitStack, repr=False)

    def run(self, command: str) -> str:
        """Run a shell block as printed, the port aside, and give what it writes; one that fails is an error."""
        serve = SERVE.fullmatch(command)
        if serve:
            self.start(serve["words"] or "")
            return ""
        done = self.try_to_run(command)
        assert done.status == 0, f"{command}\n{done.out}\n{done.notes}"
        return done.out

    def try_to_run(self, command: str) -> Done:
        """The same of a block that may fail, up to the line that does."""
        command = command.replace(PRINTED_ADDRESS, self.url.removeprefix("http://"))
        done = Done(0, "", "")
        for number, part in enumerate([command] if self.own_sources else PLAIN.split(command)):
            if part.strip() and done.status == 0:
                more = self._run_here(part) if number % 2 else self._run_in_bash(part)
                done = Done(more.status, done.out + more.out, done.notes + more.notes)
        return done

    def _run_in_bash(self, text: str) -> Done:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.path,
            env={**os.environ, "LAYERTAP_URL": self.url, "PYTHONPATH": str(self.path / "src")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )
        return Done(run.returncode, run.stdout, run.stderr)

    def _run_here(self, text: str) -> Done:
        program, *words = shlex.split(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.path)
            patch.setenv("LAYERTAP_URL", self.url)
            return run_here(*words) if program.endswith("layertap") else run_script(*words)

    def start(self, words: str = "") -> None:
        """Start a server in the place of the one that runs, if that has other options, and wait until it is ready."""
        if words != self._words:
            self.stop()
            self._words = words
            file = words.removeprefix("--config").strip()
            configuration = read_configuration(self.path / file, before_loading=True) if file else None
            workers = {"workers": 1} if file in OF_WORKERS else {}
            self.url = self._server.enter_context(serving(configuration, **workers)).url

    def stop(self) -> None:
        """End the server, if there is one."""
        self._server.close()
        self._words = None


def run_script(path: str, *words: str) -> Done:
    """A script in this process, with the modules beside it, which are forgotten after it."""
    status, out, notes, modules = 0, io.StringIO(), io.StringIO(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(notes):
        patch.setattr(sys, "argv", [path, *words])
        patch.syspath_prepend(str(Path(path).parent.absolute()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it imports may warn: no error for a reader
                runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            notes.write(f"{ended.code}\n" if isinstance(ended.code, str) else "")
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path.cwd())):
            del sys.modules[name]
    return Done(status, out.getvalue(), notes.getvalue())


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
def open_project(path: Path, *, own_sources: bool = False) -> Iterator[Project]:
    """A project in a folder until the block ends, and its server with it; no settings are in effect but these."""
    lay_out(path)
    project = Project(path, own_sources)
    settings = {"CACHE_DIR": str(CACHE), "WORKERS": "0", "DRAIN_DELAY_S": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(f"LAYERTAP_{name}", value)
        patch.setenv("COLUMNS", "200")
        try:
            yield project
        finally:
            project.stop()
