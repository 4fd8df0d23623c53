"""Copies to and from an accelerator: complete when their functions say so, whatever other streams and copies do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.devices.transfer import MAX_PINNED_BYTES, to_device, to_host
from layertap.models.inputs.device_decoder import DeviceDecoder, matches_cpu
from layertap.models.inputs.preprocess import preprocess
from layertap.models.spec import PreprocessSpec
from tests.gpu.accelerator import DEVICE, IS_SIMULATED, KIND, on_accelerator
from tests.service.gated_server import wait_until

pytestmark = [*on_accelerator, pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")]
COUNT = torch.accelerator.device_count()
ORDERS = [("lazy", 0), ("eager", 0), *(("random", seed) for seed in range(4))]
SIDE = 64
HOW = PreprocessSpec(resize=40, crop=32)


@pytest.fixture(params=ORDERS if IS_SIMULATED else [("of the device", 0)], ids=lambda order: f"{order[0]}-{order[1]}")
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    """When the simulated device computes: only what is waited for, at once, or by a seed. A GPU does as it likes."""
    if not IS_SIMULATED:
        yield
        return
    import simdev

    simdev.set_order(*request.param)
    try:
        yield
    finally:
        simdev.set_order("lazy", 0)


@contextmanager
def own_thread(device: torch.device = DEVICE) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls functions in another thread, which has another stream."""
    with ThreadPoolExecutor(1, initializer=transfer.use_own_stream, initargs=(device,)) as pool:
        yield lambda function: pool.submit(function).result()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (SIDE, SIDE), generator=torch.Generator().manual_seed(seed))


def squared(value: Tensor) -> Tensor:
    """Some work for a device, whose result is known."""
    return (value @ value) @ value


@pytest.mark.parametrize(("kind", "dtype"), [(torch.float32, torch.bfloat16), (torch.int64, torch.int64)])
@pytest.mark.parametrize("counts", [(1,), (3, 1, 4)])
def test_batches_to_the_device(counts: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype, order: None) -> None:
    """Rows of several requests are one batch, the same as by a plain copy, also while other copies are under way."""
    generator = torch.Generator().manual_seed(8)
    sent = [
        [torch.randint(-9, 9, (count, 3, 16, 16), generator=generator).to(kind) for count in counts] for _ in range(20)
    ]
    if KIND == "cuda":
        torch.cuda._sleep(100_000_000)  # all that follows waits on the device
    for parts, found in [(parts, to_device(parts, dtype, DEVICE)) for parts in sent]:
        assert (found.device, found.dtype) == (DEVICE, dtype)
        assert found.cpu().equal(torch.cat(parts).to(dtype))


def test_large_results() -> None:
    """What is too large for pinned memory comes to the host as completely."""
    check_results(MAX_PINNED_BYTES + 1)


@pytest.mark.parametrize("size", [1, 2**16])
def test_results_from_the_device(size: int, order: None) -> None:
    """What comes to the host is complete at once and stays, whatever comes after it."""
    check_results(size)


def check_results(size: int) -> None:
    data = torch.randint(0, 256, (2, size), dtype=torch.uint8)
    placed = data.to(DEVICE)
    one, other = to_host(placed[0]), to_host(placed[1])
    assert one.equal(data[0])
    assert other.equal(data[1])
    assert one.is_pinned() == (size <= MAX_PINNED_BYTES)


def test_packed_results(order: None) -> None:
    """Results of several dtypes and sizes come in one copy; what is on the host already stays there."""
    wanted = [numbers(1), numbers(2, 3).half(), torch.arange(5), torch.zeros(0)]
    with own_thread() as run:
        found = run(lambda: transfer.copy_packed([value.to(DEVICE).add(0) for value in wanted]))
    for one, other in zip(found, wanted, strict=True):
        assert one.device.type == "cpu"
        assert one.equal(other)
    assert transfer.copy_packed(wanted) is wanted
    assert transfer.copy_packed([]) == []


def test_another_thread_uses_what_was_waited_for(order: None) -> None:
    """After a thread's wait for its stream, other threads' streams find its results."""
    value = numbers(3) / SIDE

    def compute() -> Tensor:
        result = squared(value.to(DEVICE))
        transfer.synchronize_stream(DEVICE)
        return result

    with own_thread() as one, own_thread() as other:
        for _ in range(5):
            result = one(compute)
            assert other(lambda result=result: result.cpu()).allclose(squared(value), atol=1e-5)


def test_wait_for_all_threads(order: None) -> None:
    """A wait for the device includes the work of other threads in other streams."""
    value = numbers(4) / SIDE
    with own_thread() as one, own_thread() as other:
        result = one(lambda: squared(value.to(DEVICE)))
        transfer.synchronize(DEVICE)
        assert other(lambda: result.cpu()).allclose(squared(value), atol=1e-5)


def test_joined_rows(order: None) -> None:
    """Rows of the host and of a device, joined by a thread, are complete for the next thread; rows of the host stay."""
    parts = [numbers(seed, 2, 500) for seed in range(3)]
    with own_thread() as one, own_thread() as other:
        placed = one(lambda: [parts[0].to(DEVICE), parts[1], parts[2].to(DEVICE)])
        for _ in range(5):
            joined = one(lambda: transfer.join_rows(placed))
            assert joined.device == DEVICE
            assert other(lambda joined=joined: joined.cpu()).equal(torch.cat(parts))
    assert transfer.join_rows(parts).equal(torch.cat(parts))


@pytest.mark.parametrize("target", [torch.device(KIND, index) for index in range(min(COUNT, 2))], ids=str)
def test_rows_of_another_stream(target: torch.device, order: None) -> None:
    """A batch of rows that another thread made holds them, though that thread reuses their memory at once."""
    with own_thread() as maker, own_thread(target) as model:
        for seed in range(8):
            rows = numbers(seed, 2, 5000)

            def make(rows: Tensor = rows) -> list[Tensor]:
                made = [rows.to(DEVICE)]
                transfer.synchronize_stream(DEVICE)
                return made

            def use_memory_again() -> None:
                again = [torch.full((2, 5000), 7.0, device=DEVICE) for _ in range(4)]
                transfer.synchronize_stream(DEVICE)
                del again

            made = maker(make)
            batch = model(lambda: to_device([made.pop(), rows], torch.float32, target))  # noqa: B023
            maker(use_memory_again)
            assert model(lambda: to_host(batch)).equal(torch.cat([rows, rows]))  # noqa: B023


def encoded(picture: Image.Image) -> bytes:
    stream = BytesIO()
    picture.save(stream, "JPEG", quality=95)
    return stream.getvalue()


def test_decoded_rows(order: None) -> None:
    """Rows of a decoder, many at once, are complete for other streams, and near to the CPU's; others are refused."""
    pictures = [
        Image.fromarray(pixels).crop((number, 0, 90 + number, 70))
        for pixels in load_sample_images().images
        for number in range(4)
    ]
    decoder = DeviceDecoder(DEVICE, HOW)
    assert matches_cpu(decoder, HOW)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda picture: decoder.decode_row(encoded(picture), picture.size), pictures))
        wrong = decoder.decode_row(encoded(pictures[0]), (7, 7)), decoder.decode_row(b"\xff\xd8\xff", (7, 7))
    assert wrong == (None, None)
    for row, picture in zip(rows, pictures, strict=True):
        assert row is not None
        assert row.device == DEVICE
        with Image.open(BytesIO(encoded(picture))) as image:
            wanted = preprocess(image.convert("RGB"), HOW)
        assert float((row.cpu() - wanted).abs().mean()) < 0.1


def test_a_bad_picture_among_others() -> None:
    """Pictures that wait are decoded together; one that can't be, or is too large beside others, spoils none."""
    picture = Image.fromarray(load_sample_images().images[0]).crop((0, 0, 90, 70))
    decoder, data, size = DeviceDecoder(DEVICE, HOW), encoded(picture), picture.size
    asked = [(data, size), (data[:50], size), (data, (9000, 9000)), (data, size), (data, (9000, 9000))]
    with ThreadPoolExecutor(len(asked)) as pool:
        with decoder._turn:  # until all wait
            answers = [pool.submit(decoder.decode_row, *each) for each in asked]
            wait_until(lambda: len(decoder._waiting) == len(asked))
        rows = [answer.result() for answer in answers]
    assert [row is None for row in rows] == [False, True, True, False, True]
    alone = decoder.decode_row(data, size)
    assert alone is not None
    assert all(row is None or row.cpu().equal(alone.cpu()) for row in rows)
