"""A model in this process whose pictures are decoded in others: the same rows, and what ends there ends there."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.hard.pictures import gray, tiff
from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.models.plan.selectors import parse_selector
from layertap.models.registry import Registry
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.service.engine.engine import Engine
from layertap.service.engine.execute.decode import try_to_decode
from layertap.service.engine.execute.executor import Executor, InProcessExecutor
from layertap.service.engine.execute.processes.loading import create_decoder
from layertap.service.engine.execute.processes.progress import Progress
from layertap.service.engine.execute.processes.worker import DecodingWorker
from layertap.service.engine.execute.processes.worker_process import ModelLostError
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.engine.rows import Attempt, CutRows
from layertap.service.errors import UnsupportedMediaError
from layertap.service.features import Features
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.inputs.images import decode_image
from layertap.service.inputs.items import EncodedItem, LocalItem
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from tests.loading import load_model
from tests.marks import slow
from tests.service.engine.processes.fatal_pictures import CRASHES, HANGS, TAKES_ALL_MEMORY, FatalSide, draw
from tests.service.gated_server import wait_until
from tests.service.inputs.test_decode_device import OTHERS, PLAIN
from tests.service.server_process import descendants

MIB = 2**20
SPEC = ModelSpec(
    "net",
    "python:layertap.models.digits:digits",
    weights="random:0",
    device="cpu",
    inputs=(InputSpec("image", (3, 32, 32)),),
    preprocess=PreprocessSpec(resize=40, crop=32),
)
FATAL = replace(SPEC, preprocess=PreprocessSpec(resize=FatalSide(40), crop=32))
EACH = 20
LONG_S = 300.0
SELECTORS = (parse_selector("block1"), parse_selector("head"))
REFUSALS: dict[tuple[int, int], tuple[type[LayertapError], str, list[str]]] = {
    CRASHES: (InputError, "this input ends the process that decodes it", ["crash"] * 2),
    HANGS: (InputError, "this input takes longer than 3 s to decode", ["decode_timeout"]),
    TAKES_ALL_MEMORY: (TooLargeError, "there is no memory to decode this input", []),
}
SHORT_S = 3.0  # where it must pass; elsewhere no slow moment of the machine may reach the limit
SETTINGS: dict[str, Any] = {"workers": 2, "decode_timeout_s": 60.0, "worker_memory_bytes": 512 * MIB}


@asynccontextmanager
async def decoding(model: LoadedModel, **settings: Any) -> AsyncIterator[tuple[InProcessExecutor, list[str]]]:
    """An executor, and why its workers were replaced: where they are lost they start again, as a handle has them."""
    restarts: list[str] = []
    chosen = Settings(**{**SETTINGS, **settings})
    executor = InProcessExecutor(
        model, chosen, create_decoder(model, chosen, lambda _, reason: restarts.append(reason))
    )
    executor.start(lambda: None)

    async def live() -> None:
        while True:
            await executor.wait_until_lost()
            await executor.restart()

    life = asyncio.create_task(live())
    try:
        yield executor, restarts
    finally:
        life.cancel()
        await executor.close()


async def decode(executor: InProcessExecutor, model: LoadedModel, item: LocalItem) -> Attempt:
    """What becomes of an item in a worker, once there is one."""
    while True:
        try:
            ((attempt,),) = await executor.decode([item], model.model_inputs)
        except ModelLostError:
            await asyncio.sleep(0.01)
        else:
            return attempt


def decode_here(model: LoadedModel, item: LocalItem, **settings: Any) -> Attempt:
    """The same without workers."""
    (attempt,) = try_to_decode(item, model.model_inputs, Settings(**{**SETTINGS, **settings}))
    return attempt


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SPEC)


@pytest.fixture(scope="module", autouse=True)
def _fork_server(model: LoadedModel) -> None:
    """Whose process is none of an executor's: the first one starts it."""

    async def start() -> None:
        async with decoding(model):
            pass

    asyncio.run(start())


def limits(size: tuple[int, int]) -> dict[str, Any]:
    """Settings under which that picture is refused."""
    return {"decode_timeout_s": SHORT_S} if size == HANGS else {}


def png(size: tuple[int, int], value: int = 0) -> EncodedItem:
    return EncodedItem(draw(size, value))


def check_same(found: Attempt, wanted: Attempt) -> None:
    """Bits, dtypes and names of rows, or the words of a refusal, are equal."""
    if isinstance(wanted, LayertapError):
        assert isinstance(found, type(wanted))
        assert (found.detail, found.hint) == (wanted.detail, wanted.hint)
        return
    assert not isinstance(found, LayertapError), found.detail
    assert found.keys() == wanted.keys()
    assert all(value.dtype == wanted[name].dtype for name, value in found.items())
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("decode_mode", ["exact", "fast"])
def test_same_rows(model: LoadedModel, decode_mode: Any) -> None:
    """All kinds of pictures have the bits that they have without workers; bad ones are refused in the same words."""
    placed = replace(model, model_inputs=replace(model.model_inputs, decode=decode_mode))
    items = [
        *map(EncodedItem, [*PLAIN.values(), *OTHERS.values(), Image.new("1", (600, 600)).tobytes()]),
        png((600, 600)),
    ]

    async def decode_all() -> list[Attempt]:
        async with decoding(placed, max_pixels=300_000) as (executor, restarts):
            found = [await decode(executor, placed, item) for item in items]
            assert not restarts
            return found

    expected = [decode_here(placed, item, max_pixels=300_000) for item in items]
    for found, wanted in zip(asyncio.run(decode_all()), expected, strict=True):
        check_same(found, wanted)
    assert {type(wanted) for wanted in expected} == {CutRows, InputError, TooLargeError}
    dtypes = {value.dtype for wanted in expected if isinstance(wanted, dict) for value in wanted.values()}
    assert dtypes == {torch.uint8}


def test_tiff(model: LoadedModel) -> None:
    """A TIFF has the rows of a PNG of its pixels, from a process that is not the model's."""
    item = EncodedItem(draw((40, 30), 5, "TIFF"))

    async def decode_it() -> Attempt:
        async with decoding(model) as (executor, _):
            return await decode(executor, model, item)

    check_same(asyncio.run(decode_it()), decode_here(model, png((40, 30), 5)))
    assert isinstance(decode_here(model, item), UnsupportedMediaError)


def test_fax_of_garbage(model: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    """What libtiff prints of each bad row of a picture does not get into the log of a worker."""
    noise = np.random.default_rng(7).bytes(4000)
    data = tiff(gray(100, 4000, 3, len(noise), t258=(258, 3, 1, 1)), noise)
    DecodingWorker(model.model_inputs, Settings(**SETTINGS), Progress())._decode_item(0, EncodedItem(data))
    assert not capfd.readouterr().err
    decode_image(data, 10**6)
    assert capfd.readouterr().err.count("Fax") > 1000


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("which", ["host", "workers"])
def test_killed(model: LoadedModel, which: str) -> None:
    """Processes that something ends from outside cost nothing but time."""
    before = set(descendants(os.getpid()))

    async def kill_and_decode() -> list[Attempt]:
        async with decoding(model) as (executor, restarts), asyncio.timeout(LONG_S):
            host, *others = (pid for pid in descendants(os.getpid()) if pid not in before)
            for pid in [host] if which == "host" else others:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: all(has_ended(pid) for pid in others))
            found = await asyncio.gather(*(decode(executor, model, png((9, 7))) for _ in range(EACH)))
            reasons = ["killed" if which == "workers" else "unknown"] * len(others)
            await asyncio.to_thread(wait_until, lambda: restarts == reasons)
            return found

    wanted = decode_here(model, png((9, 7)))
    for found in asyncio.run(kill_and_decode()):
        check_same(found, wanted)


def extract(items: Sequence[EncodedItem], create_executor: Callable[..., Executor], **limits: Any) -> Features:
    """The features of pictures, by an engine whose model is in this process."""
    settings, metrics = Settings(**{**SETTINGS, **limits}, cpu_threads=2), Metrics()
    registry = Registry([FATAL], load_model)
    create = partial(create_executor, settings=settings)
    manager = ModelManager(registry, "net", settings, metrics, create)
    engine = Engine(manager, Fetcher(settings), settings, metrics)

    async def run() -> Features:
        try:
            request = ExtractRequest(model=None, selectors=SELECTORS, on_error="skip")
            with engine.admission.admit(time.monotonic() + LONG_S) as ticket:
                return await engine.extract(request, SentInputs(tuple(enumerate(items))), ticket)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("size", [CRASHES, slow(HANGS), TAKES_ALL_MEMORY], ids=["crash", "hang", "bomb"])
def test_engine(size: tuple[int, int]) -> None:
    """Of a request's pictures the bad ones are left out; the others have the features they have in one process.

    Half of them go to a worker in one message. The workers are gone with the engine.
    """
    before = set(descendants(os.getpid()))
    restarts: list[str] = []
    sizes: list[int] = []

    def create(model: LoadedModel, settings: Settings) -> Executor:
        decoder = create_decoder(model, settings, lambda _, reason: restarts.append(reason))
        executor, decode = InProcessExecutor(model, settings, decoder), decoder.decode
        executor.decode = lambda items, inputs: (sizes.append(len(items)), decode(items, inputs))[1]
        return executor

    items = [png((9, 7), 17 * value) for value in range(14)]
    good = [*items[:3], *items[4:10], *items[11:]]
    items[3], items[10] = png(size), EncodedItem(b"no picture")
    found = extract(items, create, **limits(size))
    wanted = extract(good, InProcessExecutor)
    _, detail, reasons = REFUSALS[size]
    assert [fault.input for fault in found.errors] == [3, 10]
    assert detail in found.errors[0].detail
    for key, value in wanted.arrays.items():  # in batches of other sizes they are rounded otherwise
        assert len({row.round(3).tobytes() for row in value}) == len(good)
        np.testing.assert_allclose(found.arrays[key], value, rtol=1e-4, atol=1e-5)
    assert restarts == reasons
    assert sizes == [7, 7, *[1] * 6 * bool(reasons)]
    wait_until(lambda: set(descendants(os.getpid())) <= before)
