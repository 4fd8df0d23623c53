"""The fork server of a process that forks, ends, or needs none: each in a Python of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

START_S = 120

# A copy of a process has a fork server of its own, and leaves that of the other one alone, also when it ends.
COPIES = """
import os, sys
from pathlib import Path
from layertap.models.digits import spec
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes.fork_server import fork_this_process
from layertap.service.engine.execute.processes.executors import load_in_host

def list_sockets():
    opened = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [name for name in opened if name.startswith("socket:")]

fork_this_process()
assert list_sockets()
if os.fork() == 0:
    assert not list_sockets()
    load_in_host(spec(), Settings(workers=2), None, print).host.close()
    sys.exit()
_, status = os.wait()
assert status == 0, status
load_in_host(spec(), Settings(workers=2), None, print).host.close()
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
assert len(children) == 1, children
"""

# A fork server that is stopped, as by a debugger, does not keep its process from ending.
STOPPED = """
import os, signal
from pathlib import Path
from layertap.service.engine.execute.processes.fork_server import fork_this_process

fork_this_process()
(child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
os.kill(int(child), signal.SIGSTOP)
"""

# No process is started before a model is loaded that runs in one.
LAZY = """
import os
from pathlib import Path
from layertap.service.app import create_app
from layertap.service.settings import Settings

create_app(Settings(workers=2))
assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
"""


@pytest.mark.parametrize("script", [COPIES, STOPPED, LAZY], ids=["copies", "stopped", "lazy"])
def test_process(script: str) -> None:
    """Whatever the process does, it ends, and all is as it says."""
    ended = subprocess.run([sys.executable, "-c", script], timeout=START_S, check=False)
    assert ended.returncode == 0
