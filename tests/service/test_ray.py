"""On a real Ray cluster of this machine: the application on replicas, and bulk jobs by actors."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server import serving
from tests.service.bulk.conftest import start, write_pictures
from tests.service.ray_cluster import Cluster, run_cluster, wait
from tests.service.support import arrays_of, picture, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # a cluster, and several processes that import torch
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
QUESTION = {"layers": ["block1", "block3", "pool"], "isolated": True}
ACTOR = "ray::_Answerer"
WORDS = ("--layers", "pool", "--pool", "mean")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with a replica."""
    with run_cluster() as cluster:
        cluster.deploy()
        yield cluster


def ask(url: str, question: dict[str, object], seeds: range) -> dict[str, np.ndarray]:
    """The arrays of one batch of pictures."""
    files = [("request", (None, json.dumps(question), "application/json"))]
    files += [("images", ("picture", picture(seed), "image/png")) for seed in seeds]
    reply = httpx.post(f"{url}/extract", params={"format": "npz"}, files=files, timeout=120)
    assert reply.status_code == 200, reply.text
    return arrays_of(reply)


def test_same_replies(cluster: Cluster) -> None:
    """Bits, ids, problems, limits and headers are those of a server of one's own, whatever the size of a reply."""
    with (
        serving(cpu_threads=1, replicas=1, workers=0) as live,
        httpx.Client(base_url=cluster.url, timeout=60) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        expected = ask(live.url, QUESTION, range(7))
        assert sum(array.nbytes for array in expected.values()) > 2**17
        for arrays in pool.map(lambda _: ask(cluster.url, QUESTION, range(7)), range(16)):
            assert same(arrays, expected)
        for path in ("/readyz", "/nothing", "/openapi.json", "/v1/models", "/v2/models/digits"):
            own, there = (each.get(path, headers={"x-request-id": "mine"}) for each in (live.client, client))
            assert (there.status_code, there.content) == (own.status_code, own.content)
            assert there.headers.get_list("x-request-id") == ["mine"]
            assert "server-timing" in there.headers
            assert set(own.headers) <= set(there.headers)
        assert len(client.get("/").headers.get_list("x-request-id")) == 1
        assert client.head("/").content == b""
        large = client.post("/extract", content=bytes(33 * 2**20), headers={"content-type": "image/png"})
        assert (large.status_code, large.json()["type"]) == (413, "urn:layertap:problem:too-large")
        far = client.get("/models", headers={"x-forwarded-for": "192.0.2.7"})
        assert (far.status_code, far.json()["title"]) == (403, "Forbidden")


def wait_for_parts(out: Path, process: subprocess.Popen[bytes], more_than: int) -> int:
    """How many parts a job has written, once these are more; it has to be at work still."""

    def count() -> int:
        return len(list(Path(f"{out}.parts").glob("part-*.parquet")))

    wait(lambda: count() > more_than or process.poll() is not None, 0.01)
    assert process.poll() is None, process.communicate()
    return count()


@pytest.mark.hard
def test_bulk(cluster: Cluster, tmp_path: Path) -> None:
    """By actors, killed and gone on with, actors killed too, one as it starts: the bytes that one process writes."""
    write_pictures(tmp_path / "source", 2500)
    (tmp_path / "source" / "00100.png").write_bytes(b"no picture")
    whole, out = tmp_path / "whole.parquet", tmp_path / "out.parquet"
    plain = start("bulk", tmp_path / "source", *WORDS, "--out", whole, **cluster.environment)
    words = ("bulk", tmp_path / "source", *WORDS, "--out", out, "--ray", "--ray-address", cluster.address)
    killed = start(*words, **cluster.environment)
    wait(lambda: bool(cluster.list_processes(ACTOR)), 0.01)
    os.kill(cluster.list_processes(ACTOR)[0], signal.SIGKILL)
    parts = wait_for_parts(out, killed, 0)
    killed.kill()
    told, _ = killed.communicate()
    assert not out.exists()
    process = start(*words, **cluster.environment)
    wait_for_parts(out, process, parts)
    os.kill(cluster.list_processes(ACTOR)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output.decode()
    assert "rows are there already" in output.decode()
    assert "00100.png: " in (told + output).decode()
    output, _ = plain.communicate(timeout=240)  # beside the others: its start takes longest
    assert plain.returncode == 0, output.decode()
    assert out.read_bytes() == whole.read_bytes()
