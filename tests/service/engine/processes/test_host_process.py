"""The fork server of a process that forks, ends, or needs none: each in a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from layertap.models.digits import spec as digits
from tests.service.engine.processes.test_decoding_executor import has_ended
from tests.service.engine.processes.test_trouble import parent
from tests.service.gated_server import wait_until
from tests.service.load_server import process
from tests.service.server_process import descendants
from tests.service.support import raw

START_S = 120

# A copy of a process has a fork server of its own, and leaves that of the other one alone, also when it ends.
# A worker that was started when the server began to end has nobody who asks it: it ends, and is waited for.
COPIES = """
import os, sys
from pathlib import Path
from layertap.models.digits import spec
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes.fork_server import fork_this_process
from layertap.service.engine.execute.processes.loading import load_in_host

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
(worker,) = host.workers.values()
host.close()
assert worker.channel.connection.fileno() == -1
assert not Path(f"/proc/{worker.pid}").exists()
assert not host.workers
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
assert len(children) == 1, children
"""

# A fork server that is killed again and again: what failed may pass, and no hint sends anybody to a traceback.
KILLED = """
import os, signal, threading
from contextlib import suppress
from pathlib import Path
from layertap.models.digits import spec
from layertap.models.errors import LoadError
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes.loading import load_in_host

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

# While a library is imported for one model, which takes as long as it takes, another model loads.
BESIDE = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from layertap.models.digits import spec
from layertap.models.spec import ModelSpec
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes import fork_server
from layertap.service.engine.execute.processes.loading import load_in_host

gate = Path(sys.argv[1])

def wait_for_gate():
    gate.with_suffix(".begun").touch()
    while not gate.exists():
        time.sleep(0.01)

fork_server.IMPORTS = {"torchvision": wait_for_gate}
fork_server.fork_this_process()
slow = ModelSpec("slow", "torchvision:squeezenet1_1", weights="random:0", device="cpu")
with ThreadPoolExecutor(1) as pool:
    loading = pool.submit(load_in_host, slow, Settings(workers=1), None, print)
    while not gate.with_suffix(".begun").exists():
        time.sleep(0.01)
    load_in_host(spec(), Settings(workers=1), None, print).host.close()
    assert not loading.done()
    gate.touch()
    loading.result().host.close()
"""

# As PID 1 a server adopts the workers of a host that is killed: it waits for all of them.
ADOPTS = """
import os, signal
from pathlib import Path
from layertap.models.digits import spec
from layertap.service.settings import Settings
from layertap.service.engine.execute.processes import forking
from layertap.service.engine.execute.processes.loading import load_in_host

forking._prctl(forking.PR_SET_CHILD_SUBREAPER, 1)
host = load_in_host(spec(), Settings(workers=4), None, print).host
for _ in range(3):
    before = list(host.workers)
    os.kill(int(Path(f"/proc/{before[0]}/stat").read_text().split()[3]), signal.SIGKILL)
    host.load()
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
host.close()
"""

SCRIPTS = {"copies": COPIES, "killed": KILLED, "beside": BESIDE, "adopts": ADOPTS}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_process(script: str, tmp_path: Path) -> None:
    """Whatever the process does, it ends, and all is as it says."""
    ended = subprocess.run([sys.executable, "-c", script, tmp_path / "gate"], timeout=START_S, check=False)
    assert ended.returncode == 0


END_S = 20


def list_opened(pid: int, kind: str) -> set[str]:
    opened = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    return {name for name in opened if name.startswith(kind)}


def list_sockets(pid: int) -> set[str]:
    return list_opened(pid, "socket:")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_serve(tmp_path: Path, way: signal.Signals, status: int) -> None:
    """The copy holds none of the server's sockets; killed, it takes no model with it, and another one takes its place.

    All processes end with the server, also those that hang.
    """
    request = raw(Path("examples/digit.png").read_bytes(), "image/png", layers="pool")
    with process([digits()], tmp_path, LAYERTAP_WORKERS="2") as server:
        good = httpx.post(f"{server.url}/extract", **request)
        assert good.status_code == 200
        before = descendants(server.running.pid)
        copy, host, *workers = before
        assert [parent(pid) for pid in before] == [server.running.pid] * 2 + [host] * 2
        assert not list_opened(host, "pipe:") - list_opened(server.running.pid, "pipe:")  # but for what it prints to
        for pid in before:
            assert not list_sockets(pid) & list_sockets(server.running.pid)
        os.kill(copy, signal.SIGKILL)
        wait_until(lambda: has_ended(copy))
        again = httpx.post(f"{server.url}/extract", timeout=60, **request)
        assert again.json()["features"] == good.json()["features"]
        assert not any(has_ended(pid) for pid in (host, *workers))
        os.kill(host, signal.SIGKILL)
        wait_until(lambda: has_ended(host))
        again = httpx.post(f"{server.url}/extract", timeout=60, **request)
        assert again.json()["features"] == good.json()["features"]
        after = descendants(server.running.pid)
        assert len(after) == 4
        assert not set(after) & set(before)
        for pid in after if way == signal.SIGKILL else ():
            if parent(pid) != server.running.pid or descendants(pid):  # all but the fork server
                os.kill(pid, signal.SIGSTOP)
        server.running.send_signal(way)
        assert server.running.wait(END_S) == status
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*before, *after)))
