"""Workers that really die: who caused it is told, nobody else notices, and another one takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.service.engine.execute.processes.loading import HostedModel
from layertap.service.engine.execute.processes.process_executor import ProcessExecutor
from layertap.service.engine.execute.processes.worker_process import WorkerDiedError
from layertap.service.inputs.items import TextItem
from tests.marks import slow
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.engine.processes.fatal_pictures import CRASHES, HANGS, TAKES_ALL_MEMORY, draw
from tests.service.gated_server import connect, encode_request, wait_until
from tests.service.server_process import descendants, fatal_model_spec
from tests.service.support import arrays_of, configured, net, npy, problem, raw, rows

PICTURES = ModelSpec(
    "pictures",
    "python:tests.service.engine.processes.fatal_pictures:Net",
    weights="random:0",
    device="cpu",
    inputs=(InputSpec("x", (3, 8, 8)),),
    preprocess=PreprocessSpec(resize=8, crop=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interpolation="bilinear"),
)
MIB = 2**20
DECODE_TIMEOUT_S = 4.0
CLIENTS, EACH, ASKED = 4, 20, 200
PICTURES_SENT = 30


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which a model notes its forwards."""
    return tmp_path_factory.mktemp("killed") / "forwards"


@pytest.fixture(scope="module")
def fatal(serve: Serve, killed: Path) -> Iterator[Live]:
    """A server of a model whose decoder can't be trusted, and of two that end their process."""
    limits = {"decode_timeout_s": DECODE_TIMEOUT_S, "worker_memory_bytes": 512 * MIB}
    hangs = net("hangs", "HangsOnWide", InputSpec("x", (1, 2, 2)), module="tests.service.slow_models")
    doomed, killing = fatal_model_spec("Doomed"), fatal_model_spec("Killed", args={"path": str(killed)})
    with serve(configured(PICTURES, doomed, killing, hangs, load="startup"), workers=2, **limits) as live:
        yield live


def send(live: Live, size: tuple[int, int], value: int = 0) -> Any:
    return live.client.post("/extract", **raw(draw(size, value), "image/png", model="pictures", layers="linear"))


def check_same(replies: Sequence[Any], good: Sequence[Any]) -> None:
    """The same features; in batches of other sizes they are rounded otherwise."""
    for reply, wanted in zip(replies, good, strict=True):
        for found, value in zip(arrays_of(reply).values(), arrays_of(wanted).values(), strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)


def list_pids(live: Live, model: str) -> list[int]:
    hosted = live.engine.manager.handles[model].model
    assert isinstance(hosted, HostedModel)
    return list(hosted.host.workers)


def parent(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


REFUSALS = {
    CRASHES: (422, "this input ends the process that decodes it"),
    HANGS: (422, "this input takes longer than 4 s to decode"),
    TAKES_ALL_MEMORY: (413, "there is no memory to decode this input"),
}


@pytest.mark.parametrize("size", [CRASHES, slow(HANGS), TAKES_ALL_MEMORY], ids=["crash", "hang", "bomb"])
def test_decoder(fatal: Live, size: tuple[int, int]) -> None:
    """A picture that its decoder can't stand is refused; beside it everybody is answered as ever."""
    good = [send(fatal, (8, 8), value) for value in range(EACH)]
    before = list_pids(fatal, "pictures")
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        bad = pool.submit(send, fatal, size)
        replies = list(pool.map(lambda value: send(fatal, (8, 8), value % EACH), range(CLIENTS * EACH)))
        status, detail = REFUSALS[size]
        found = problem(bad.result(), status)
    assert detail in found["detail"]
    check_same(replies, good * CLIENTS)
    if size == TAKES_ALL_MEMORY:
        assert list_pids(fatal, "pictures") == before
    else:  # the answer comes before the worker that was ended is waited for
        wait_until(lambda: len(pids := list_pids(fatal, "pictures")) == len(before) and pids != before)


@pytest.mark.parametrize("size", [CRASHES, TAKES_ALL_MEMORY], ids=["crash", "bomb"])
def test_tiff(fatal: Live, size: tuple[int, int]) -> None:
    """Nor is a TIFF decoded in the server itself: one that its decoder can't stand is refused alone."""
    query = {"model": "pictures", "layers": "linear", "on_error": "skip", "format": "npz"}
    files = [("images", ("x", draw(each, 1, "TIFF"), "image/tiff")) for each in ((8, 8), size, (8, 8))]
    reply = fatal.client.post("/extract", files=files, params=query)
    assert reply.headers["x-layertap-skipped"] == "1"
    (found,), (wanted,) = arrays_of(reply).values(), arrays_of(send(fatal, (8, 8), 1)).values()
    np.testing.assert_allclose(found, [wanted[0]] * 2, rtol=1e-4, atol=1e-5)
    status, detail = REFUSALS[size]
    alone = raw(draw(size, 1, "TIFF"), "image/tiff", model="pictures", layers="linear")
    assert detail in problem(fatal.client.post("/extract", **alone), status)["detail"]


def test_decoder_in_a_request(fatal: Live) -> None:
    """Of many pictures the one that ends its process is left out; the others are answered, or none, as is asked."""
    sizes = [CRASHES if place == 1 else (8, 8) for place in range(PICTURES_SENT)]
    files = [("images", (f"{place}.png", draw(size), "image/png")) for place, size in enumerate(sizes)]
    query = {"model": "pictures", "layers": "linear", "on_error": "skip", "format": "npz"}
    reply = fatal.client.post("/extract", files=files, params=query)
    assert reply.headers["x-layertap-skipped"] == "1"
    assert arrays_of(reply)["linear"].shape == (PICTURES_SENT - 1, 4)
    status, detail = REFUSALS[CRASHES]
    found = problem(fatal.client.post("/extract", files=files, params={**query, "on_error": "fail"}), status)
    assert found["errors"][0]["input"] == 1
    assert detail in found["detail"]


def send_row(live: Live, value: float, model: str = "doomed") -> Any:
    return live.client.post("/extract", **raw(npy(rows(1, value)), "application/x-npy", model=model, layers="linear"))


def test_worker_killed(fatal: Live) -> None:
    """Workers that something ends from outside, while they run and while they don't, cost no answer."""
    good = send_row(fatal, 1.0)
    for _ in range(3):
        before = list_pids(fatal, "doomed")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with ThreadPoolExecutor(CLIENTS) as pool:
            replies = list(pool.map(lambda _: send_row(fatal, 1.0), range(CLIENTS * 2)))
        check_same(replies, [good] * len(replies))
        for _ in range(ASKED):  # a worker is replaced once it is asked
            send_row(fatal, 1.0)
            pids = list_pids(fatal, "doomed")
            if len(pids) == len(before) and not set(before) & set(pids):
                break
        else:
            pytest.fail("a worker that was killed is still there")
    assert fatal.client.get("/readyz").status_code == 200


@pytest.mark.parametrize(("times", "status"), [(4, 200), (5, 503)])
def test_killed_again_and_again(fatal: Live, killed: Path, times: int, status: int) -> None:
    """A forward whose process is killed from outside has not crashed: it is tried again, alone, up to four times."""
    killed.write_bytes(b"")
    reply = send_row(fatal, 1000.0 + times, "killed")
    assert reply.status_code == status
    if status == 503:
        assert "was killed 5 times" in problem(reply, 503, seconds=True)["detail"]
    assert killed.stat().st_size == 5


def test_cancelled_while_it_waits(fatal: Live) -> None:
    """What waits for a worker when its caller goes is not sent: it ends none, and those behind it are answered."""
    executor = fatal.engine.manager.handles["pictures"].executor
    assert isinstance(executor, ProcessExecutor)
    workers = executor.workers

    async def ask_busy() -> None:
        wait_until(lambda: len(workers._idle) == 2)
        busy = [workers.take(), workers.take()]
        taken = [worker.progress.taken for worker in busy]
        gone, asking = [asyncio.ensure_future(workers.ask(("decode", []), seconds=60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        for worker in busy:
            workers._add(worker)
        assert await asking == []
        assert sum(worker.progress.taken for worker in busy) == sum(taken) + 1
        assert set(workers._workers) == set(busy)

    fatal.run(ask_busy())


def test_worker_stopped(fatal: Live) -> None:
    """A worker that reads nothing is given up after the time that a message has, however large that is."""
    good = send_row(fatal, 1.0)
    executor = fatal.engine.manager.handles["doomed"].executor
    assert isinstance(executor, ProcessExecutor)
    workers = executor.workers

    async def ask_stopped() -> None:
        os.kill(workers._idle[-1].pid, signal.SIGSTOP)
        await workers.ask(("decode", [TextItem("x" * 16 * MIB)]), seconds=0.0)

    with pytest.raises(WorkerDiedError) as raised:
        fatal.run(ask_stopped())
    assert raised.value.cause == "timeout"
    check_same([send_row(fatal, 1.0) for _ in range(4)], [good] * 4)


def build_wide_request(live: Live, width: int) -> httpx.Request:
    """Of these pictures only squares, which are two high, have a forward that ends."""
    pixels = npy(np.ones((1, 1, 2, width), np.float32))
    query = raw(pixels, "application/x-npy", model="hangs", layers="conv")
    return live.client.build_request("POST", "/extract", **query)


def test_survey_has_a_process_of_its_own(fatal: Live) -> None:
    """Every worker of its model answers meanwhile; once nobody waits for it, it is ended, and no worker is replaced."""
    assert fatal.client.send(build_wide_request(fatal, 2)).status_code == 200
    before = set(list_pids(fatal, "hangs"))
    for width in range(3, 6):
        with connect(fatal) as connection:
            connection.sendall(encode_request(build_wide_request(fatal, width)))
            wait_until(lambda: len(list_pids(fatal, "hangs")) == len(before) + 1)
            replies = [fatal.client.send(build_wide_request(fatal, 2)) for _ in before]
            assert [reply.status_code for reply in replies] == [200] * len(before)
        wait_until(lambda: set(list_pids(fatal, "hangs")) == before)
    assert not read_restarts(fatal, "hangs")


def test_survey_given_up_before_it_begins(fatal: Live) -> None:
    """No process is started for it."""
    executor = fatal.engine.manager.handles["doomed"].executor
    assert isinstance(executor, ProcessExecutor)
    workers = executor.workers

    async def give_up() -> None:
        before = set(workers.host.workers)
        async with workers._starting:
            asking = [asyncio.ensure_future(workers.ask_apart(("decode", []), seconds=60.0)) for _ in range(5)]
            await asyncio.sleep(0)
            for each in asking:
                each.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*workers._tasks)
        assert set(workers.host.workers) == before

    fatal.run(give_up())


def read_restarts(live: Live, model: str) -> dict[str, float]:
    """How often workers of a model were replaced, by reason."""
    samples = [
        sample
        for family in text_string_to_metric_families(live.client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "layertap_worker_restarts_total" and sample.labels["model"] == model
    ]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.value}


@pytest.mark.slow
def test_restarts_are_counted(serve: Serve) -> None:
    """The metrics tell that a worker was replaced, and why, and nothing else."""
    with serve(configured(PICTURES, fatal_model_spec("Doomed")), workers=2, decode_timeout_s=1.0) as live:
        assert [reply.status_code for reply in (send(live, (8, 8)), send_row(live, 1.0))] == [200, 200]
        problem(send_row(live, 1001.0), 500)
        wait_until(lambda: read_restarts(live, "doomed").keys() == {"failure"})
        for pid in list_pids(live, "doomed"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: read_restarts(live, "doomed").keys() == {"failure", "killed"})
        for size in (CRASHES, HANGS):
            problem(send(live, size), 422)
        wait_until(lambda: read_restarts(live, "pictures").keys() == {"crash", "decode_timeout"})


def test_lasting_failure(fatal: Live) -> None:
    """What a model has done to itself ends with its worker: the next request finds another one, which is whole."""
    good = send_row(fatal, 1.0)
    for mark in (1001.0, 1002.0, 1003.0):  # it raises whatever it is given; it asks its process to exit; it exits
        problem(send_row(fatal, mark), 500)
        for _ in range(4):
            check_same([send_row(fatal, 1.0)], [good])
    assert fatal.client.get("/livez").status_code == 200


def test_asked_to_end(fatal: Live) -> None:
    """SIGTERM and SIGINT for all processes, as service managers and terminals send them, are for the server alone."""
    wait_until(lambda: len(list_pids(fatal, "doomed")) == 2)  # that of a test before, too
    before = list_pids(fatal, "doomed")
    host = parent(before[0])
    for pid in descendants(os.getpid()):  # fork servers, too
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert send_row(fatal, 1.0).status_code == 200
    assert list_pids(fatal, "doomed") == before
    assert parent(before[0]) == host


def test_unloaded(serve: Serve) -> None:
    """An unloaded model leaves no process behind, and can be loaded again."""
    with serve(configured(fatal_model_spec("Doomed", load="lazy")), workers=2) as live:
        good = send_row(live, 1.0)
        pids = list_pids(live, "doomed")
        assert live.client.post("/models/doomed/unload").status_code == 200
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        check_same([send_row(live, 1.0)], [good])
        pids = list_pids(live, "doomed")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
