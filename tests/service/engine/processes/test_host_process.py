"""The fork server of a process that forks, ends, or needs none: each in a Python of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

START_S = 120

# A copy of a process has a fork server of its own, and leaves that of the other one alone, also when it ends.
# A worker that was started when the server began to end has nobody who asks it: it ends, and is waited for.
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
host = load_in_host(spec(), Settings(workers=1), None, print).host
worker = host.start_worker()
assert list(host.workers) == [worker.pid]
host.close()
assert worker.connection.fileno() == -1
assert not Path(f"/proc/{worker.pid}").exists()
assert not host.workers
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
assert len(children) == 1, children
"""

# No process is started before a model is loaded that runs in one. What a first model needs is imported before anybody
# asks for its host, and by the fork server alone. One that is stopped, as by a debugger, keeps no process from ending.
EAGER = """
import os, signal, sys, time
from pathlib import Path
from layertap.service.app import create_app
from layertap.service.engine.execute.processes.fork_server import fork_this_process
from layertap.service.settings import Settings

create_app(Settings(workers=2))
assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
fork_this_process("torchvision:resnet18")
(child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
while "/torchvision/" not in Path(f"/proc/{child}/maps").read_text():
    time.sleep(0.01)
assert "torchvision" not in sys.modules
os.kill(int(child), signal.SIGSTOP)
"""

# A host that the system allows no more processes says so, and goes on. For root there is no such limit.
NO_PROCESSES = """
import os, resource, socket
from contextlib import suppress
from layertap.models.digits import spec
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes import host
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.messages import HostOptions, StartWorker, WaitForProcess
from layertap.service.engine.execute.processes.progress import create_progress

channel, connection = connect()
options = HostOptions(spec(), Settings(), (), worker_bytes=2**30, plans=None)
for message in (StartWorker(), StartWorker(), WaitForProcess(os.getpid())):
    descriptors = (connection.fileno(), create_progress()[1]) if isinstance(message, StartWorker) else ()
    channel.send(message, descriptors)
channel.connection.shutdown(socket.SHUT_WR)
if os.geteuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
with suppress(EOFError):
    host._serve(Channel(connection), print, options)
assert [channel.receive(timeout=0) for _ in range(3)] == [None] * 3
"""

# A model that is closed while its host is started is not loaded, and leaves no process.
CLOSED = """
import os, signal, threading, time
from pathlib import Path
from layertap.models.digits import spec
from layertap.models.errors import LoadError
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes.fork_server import fork_this_process
from layertap.service.engine.execute.processes.messages import HostOptions
from layertap.service.engine.execute.processes.model_host import ModelHost

def list_children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

fork_this_process()
(server,) = list_children(os.getpid())
os.kill(server, signal.SIGSTOP)
host = ModelHost(HostOptions(spec(), Settings(), (), worker_bytes=2**30, plans=None), print)
errors = []

def load():
    try:
        host.load()
    except LoadError as error:
        errors.append(str(error))

loading = threading.Thread(target=load)
loading.start()
while not host._lock.locked():
    time.sleep(0.01)
closing = threading.Thread(target=host.close)
closing.start()
while not host._closed:
    time.sleep(0.01)
os.kill(server, signal.SIGCONT)
loading.join()
closing.join()
assert errors == ["model digits is unloaded"], errors
assert not list_children(server)
"""

# A fork server that is killed again and again: what failed may pass, and no hint sends anybody to a traceback.
KILLED = """
import os, signal, threading
from contextlib import suppress
from pathlib import Path
from layertap.models.digits import spec
from layertap.models.errors import LoadError
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes.executors import load_in_host

def kill_children():
    while not ended.is_set():
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

ended = threading.Event()
killing = threading.Thread(target=kill_children)
killing.start()
try:
    load_in_host(spec(), Settings(workers=2), None, print)
except LoadError as error:
    assert (error.kind, error.detail, error.hint) == ("killed", "no process can be started to load it", ""), error
else:
    raise AssertionError("it was loaded")
finally:
    ended.set()
    killing.join()
"""

SCRIPTS = {
    "copies": COPIES,
    "eager": EAGER,
    "no processes": NO_PROCESSES,
    "closed": CLOSED,
    "killed": KILLED,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_process(script: str) -> None:
    """Whatever the process does, it ends, and all is as it says."""
    ended = subprocess.run([sys.executable, "-c", script], timeout=START_S, check=False)
    assert ended.returncode == 0
