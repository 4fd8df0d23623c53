"""One model's trouble is nobody else's: hosts that die, or load for ever, and what a model says of itself meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from layertap.models.digits import spec as digits
from layertap.models.run.reduction import Reduced
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from layertap.service.engine.batch import SliceResult
from layertap.service.engine.execute.processes.channel import MAX_PACKET_BYTES, Channel, connect
from layertap.service.engine.execute.processes.worker import split_results
from tests.conftest import WARM, net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.engine.processes.fatal_pictures import HANGS, draw
from tests.service.engine.processes.test_decoding_executor import has_ended
from tests.service.engine.processes.test_trouble import PICTURES, list_pids, parent, send
from tests.service.gated_server import wait_until
from tests.service.support import ROW, Json, configured, npy, problem, raw, rows, tensor

DIGIT = raw(Path("examples/digit.png").read_bytes(), "image/png", layers="pool", model="digits")
SMALL_BYTES, LARGE_BYTES = 400, 30 * 2**20


def slow_spec(factory: str, name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(
        name,
        f"python:tests.service.slow_models:{factory}",
        weights="random:0",
        device="cpu",
        inputs=fields.pop("inputs", (ROW,)),
        **fields,
    )


def ask(live: Live, model: str, value: float = 0.5, count: int = 1) -> Any:
    return live.client.post(
        "/extract", **raw(npy(rows(count, value)), "application/x-npy", layers="linear", model=model)
    )


def metric(live: Live, name: str, **labels: str) -> float:
    """A figure; 0 where there is none."""
    families = text_string_to_metric_families(live.client.get("/metrics").text)
    samples = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def state(live: Live, model: str) -> str:
    return live.client.get(f"/models/{model}").json()["state"]


def kill_host_of(live: Live, model: str) -> None:
    """As the system does where it runs out of memory; its workers end with it."""
    pids = [pid for pid in list_pids(live, model) if not has_ended(pid)]
    os.kill(parent(pids[0]), signal.SIGKILL)
    wait_until(lambda: all(has_ended(pid) for pid in pids))


def test_another_model_loads_again(serve: Serve, tmp_path: Path) -> None:
    """While a model's host is started again, however long that lasts, its requests wait, and another model answers."""
    gate = tmp_path / "gate"
    gate.touch()
    with serve(configured(slow_spec("GatedLoad", "slow", args={"gate": str(gate)})), workers=2) as live:
        good = ask(live, "slow").json()["features"]
        assert live.client.post("/extract", **DIGIT).status_code == 200
        gate.unlink()
        kill_host_of(live, "slow")
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(ask, live, "slow") for _ in range(4)]
            wait_until(lambda: state(live, "slow") == "loading")
            for _ in range(20):
                assert live.client.post("/extract", **DIGIT).status_code == 200
            assert state(live, "slow") == "loading"
            assert not any(each.done() for each in waiting)
            gate.touch()
            assert [each.result().json()["features"] for each in waiting] == [good] * 4
        assert state(live, "slow") == "ready"


def test_noticed_while_idle(serve: Serve) -> None:
    """A worker that dies while nobody asks is started again at once, and so is a host."""
    with serve(configured(), workers=2) as live:
        good = live.client.post("/extract", **DIGIT).json()["features"]
        for which in ("worker", "host"):
            before = list_pids(live, "digits")
            os.kill(parent(before[0]) if which == "host" else before[0], signal.SIGKILL)
            wait_until(lambda before=before: len(pids := list_pids(live, "digits")) == 2 and before[0] not in pids)  # type: ignore[misc]
            assert live.client.post("/extract", **DIGIT).json()["features"] == good


@pytest.mark.slow
def test_killed_while_loading(serve: Serve, tmp_path: Path) -> None:
    """A model whose process is killed while it is built or surveyed is loading, not failed, and its requests wait.

    Until it is loaded, its processes are the first that the system kills.
    """
    built, ran = (tmp_path / "built", tmp_path / "ran")
    spec = slow_spec("GatedBoth", "slow", args={"built": str(built), "ran": str(ran)}, load="lazy")
    with serve(configured(spec), workers=1) as live, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, live, "slow")
        for gate in (built, ran):
            begun = Path(f"{gate}.begun")
            wait_until(lambda begun=begun: begun.exists() and bool(begun.read_text()))  # type: ignore[misc]
            loading = int(begun.read_text())
            assert read_oom_score(loading) == 1000
            begun.unlink()
            os.kill(loading, signal.SIGKILL)
            wait_until(begun.exists)  # another one has begun
            assert state(live, "slow") == "loading"
            gate.touch()
        assert asking.result().status_code == 200
        (worker,) = list_pids(live, "slow")
        assert [read_oom_score(pid) for pid in (parent(worker), worker)] == [read_oom_score(os.getpid()), 500]


def read_oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.slow
def test_an_unproven_model_now(serve: Serve) -> None:
    """A model that holds what can't be read is loaded again like others, and keeps the fingerprint of its load."""
    spec = ModelSpec("draws", "python:tests.service.fatal_models:Unreadable", device="cpu", inputs=(ROW,))
    with serve(Configuration((spec,), "draws"), workers=1) as live:
        first = ask(live, "draws").headers["x-layertap-fingerprint"]
        kill_host_of(live, "draws")
        again = ask(live, "draws")
        assert again.status_code == 200
        assert again.headers["x-layertap-fingerprint"] == first
        assert first.startswith("unproven-")


@pytest.mark.slow
def test_another_model_now(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model whose weights are others when it is loaded again is failed, wherever one looks."""
    path = tmp_path / "weights.safetensors"
    weights = torch.nn.Linear(4, 3).state_dict()
    save_file({f"linear.{name}": value for name, value in weights.items()}, path)
    spec = ModelSpec("file", "python:tests.service.fatal_models:Doomed", weights=str(path), device="cpu", inputs=(ROW,))
    with serve(Configuration((spec, digits()), "file"), workers=2) as live:
        assert ask(live, "file").status_code == 200
        save_file({f"linear.{name}": value + 1 for name, value in weights.items()}, path)
        kill_host_of(live, "file")
        wait_until(lambda: state(live, "file") == "failed")
        assert "it is another model than before" in live.client.get("/models/file").json()["reason"]
        assert problem(live.client.get("/readyz"), 503, seconds=True)["detail"].startswith("1 of the models")
        assert "another model" in problem(ask(live, "file"), 503)["detail"]
        assert metric(live, "layertap_model_state", model="file", state="failed") == 1
        assert live.client.post("/extract", **DIGIT).status_code == 200
        (line,) = [each for each in caplog.records if each.message == "a model could not be loaded"]
        assert "another model" in vars(line)["fields"]["reason"]
        assert live.client.post("/models/file/load").status_code == 200
        assert ask(live, "file").status_code == 200


@pytest.mark.slow
def test_call_that_hangs(serve: Serve) -> None:
    """A survey that hangs is ended once it has taken far longer than expected: the worker answers again."""
    spec = slow_spec("HangsOnWide", "hangs", inputs=(InputSpec("x", (1, 2, 2)),))
    body = {"model": "hangs", "layers": ["conv"]}
    good = {**body, "inputs": [tensor(np.ones((1, 2, 2), np.float32))]}
    wide = {**body, "inputs": [tensor(np.ones((1, 2, 3), np.float32))]}
    with serve(configured(spec), workers=1, deadline_s=8.0) as live:
        assert live.client.post("/extract", json=good).status_code == 200
        assert "takes more than 2 s" in problem(live.client.post("/extract", json=wide), 413)["detail"]
        wait_until(lambda: live.client.post("/extract", json=good).status_code == 200)


@pytest.mark.slow
def test_decoding_is_work(serve: Serve) -> None:
    """A model that still decodes is not idle, though nobody waits for that any more."""
    with serve(configured(PICTURES), workers=2, decode_timeout_s=3.0) as live:
        handle, is_idle = live.engine.manager.handles["pictures"], live.engine.manager.scheduler.is_idle
        files = [("images", (name, draw(size), "image/png")) for name, size in (("a", HANGS), ("b", (8, 8)))]
        query = {"model": "pictures", "layers": "linear", "isolated": "true"}
        late = live.client.post("/extract", files=files, params=query, headers={"x-request-timeout": "0.5"})
        problem(late, 504, seconds=True)
        assert not is_idle(handle.key)
        wait_until(lambda: is_idle(handle.key))
        assert send(live, (8, 8)).status_code == 200


def list_mappings() -> list[int]:
    """Bytes of the memory that came with messages and is mapped here."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:layertap" in line]
    return [int(end, 16) - int(begin, 16) for begin, _, end in (line[0].partition("-") for line in lines)]


def test_memory_of_neighbours() -> None:
    """Who keeps a small result of a batch keeps nothing of the large one beside it."""
    channel, connection = connect()
    other = Channel(connection)
    sizes = (SMALL_BYTES, LARGE_BYTES, SMALL_BYTES)
    results = [
        SliceResult(index, 0, 1, {index: Reduced(np.ones(size // 4, np.float32))}, 3)  # type: ignore[dict-item]  (any capture does)
        for index, size in enumerate(sizes)
    ]
    received: list[SliceResult] = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [channel.send(part) for part in split_results(results)])
        while len(received) < len(sizes):
            received += other.receive()
        sending.result()
    assert [each.nbytes for each in received] == list(sizes)
    assert max(list_mappings()) >= LARGE_BYTES
    del received[1]
    assert max(list_mappings(), default=0) <= MAX_PACKET_BYTES
    channel.close()
    other.close()


SPEC = net_spec("Chain", warm=(WARM,))


def extract(live: Live) -> Any:
    body: Json = {"layers": ["conv"], "inputs": [tensor(torch.ones(3, 8, 8).numpy())]}
    return live.client.post("/extract", json=body)


@pytest.mark.hard
@pytest.mark.usefixtures("compiler")
def test_graphs_are_opened(serve: Serve, tmp_path: Path) -> None:
    """A host that is started anew has the graphs that it had; where one is gone it is refused, and none is compiled."""
    with serve(Configuration((SPEC,), SPEC.name), cache_dir=tmp_path, cpu_threads=2, workers=2) as live:
        good = extract(live).json()
        assert good["receipts"]["conv"]["forward"] == "compiled"
        kill_host_of(live, SPEC.name)
        again = extract(live).json()
        assert (again["features"], again["receipts"]) == (good["features"], good["receipts"])
        graphs = sorted((tmp_path / "plans").glob("*.pt2"))
        graphs[0].unlink()
        kill_host_of(live, SPEC.name)
        found = problem(extract(live), 503, seconds=True)
        assert "it is another model than before" in found["detail"]
        assert found["errors"][0]["hint"] == f"POST /models/{SPEC.name}/load tries again"
        assert sorted((tmp_path / "plans").glob("*.pt2")) == graphs[1:]
