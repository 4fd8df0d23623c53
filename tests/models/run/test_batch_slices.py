"""Several requests in one forward: each gets its own rows' tensors, whoever the others are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.devices.transfer import ALIGNMENT, pack, to_device, unpack
from layertap.models.plan.plan import Capture
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.requested import Reduction
from layertap.models.plan.statistics import STATS
from layertap.models.points import Point
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.reduction import ReducedTensor
from layertap.models.spec import Pool, ReplyDType
from tests.conftest import Loader
from tests.models.extraction import list_tensors, see
from tests.nets import batch

Array = NDArray[Any]
POOLS: tuple[Pool, ...] = tuple(POOLINGS)
DTYPES: tuple[ReplyDType, ...] = get_args(ReplyDType)
# Whole feature maps, windows folded into the batch, rows on axis 1, structured values, parts that run often, views.
NETS = ("resnet", "swin", "TimeFirst", "Structured", "Keywords", "Recursive", "Views", "Kinds")


@dataclass(frozen=True)
class Guest:
    """A request: its rows and what it wants of them."""

    rows: Mapping[str, Tensor]
    captures: frozenset[Capture]

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))


def together(
    model: LoadedModel, guests: Sequence[Guest], padded: int | None = None
) -> list[dict[Capture, ReducedTensor]]:
    """What each guest gets of one forward for all."""
    shares, at = [], 0
    for guest in guests:
        shares.append(RequestSlice(at, at + len(guest), guest.captures))
        at += len(guest)
    taken = model.run(model.replicas[0], [guest.rows for guest in guests], shares, padded)
    return [taken.select(share) for share in shares]


def tensors_of(model: LoadedModel) -> list[tuple[Point, TensorInfo]]:
    """Every tensor that a forward of several requests may be asked for."""
    found = list_tensors(model.catalog, "output", "input")
    return [(point, info) for point, info in found if not info.crosses_rows and info.dtype != "complex64"]


def allowed(info: TensorInfo, how: Reduction) -> bool:
    """The rules of a request, told again."""
    if how.pool == "none":
        return not how.normalize and (how.dtype != "int8" or info.row_axis in (0, None))
    if info.row_axis is None or (how.pool != "flatten" and info.layout is None):
        return False
    return how.pool != "cls" or info.prefix > 0


def ways(info: TensorInfo) -> list[Reduction]:
    """Every reduction that a tensor may be asked for with."""
    return [
        how
        for pool in POOLS
        for normalize in (False, True)
        for dtype in DTYPES
        if allowed(info, how := Reduction(pool=pool, normalize=normalize, dtype=dtype))
    ]


def some(
    model: LoadedModel, dice: random.Random, count: int, found: Sequence[tuple[Point, TensorInfo]]
) -> set[Capture]:
    chosen = dice.sample(list(found), min(count, len(found)))
    return {Capture(point, info, dice.choice(ways(info))) for point, info in chosen}


# An oracle of reductions: numpy, row by row, in double precision.


def expected(value: Tensor, capture: Capture) -> Array:
    """What a capture is of a tensor that an independent hook copied in a forward of these rows alone."""
    info, how = capture.info, capture.reduction
    whole: Array = value.numpy() if not value.is_floating_point() else value.to(torch.float64).numpy()
    if how.pool == "none":
        return whole
    axis = info.row_axis or 0
    rows = np.split(whole, whole.shape[axis] // info.shape[axis], axis)
    found = np.stack([_one(row, info, how.pool) for row in rows])
    return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12) if how.normalize else found


def _one(row: Array, info: TensorInfo, pool: Pool) -> Array:
    if pool == "flatten":
        return row.reshape(-1)
    layout = info.layout or ""
    channels = np.moveaxis(row, layout.index("C"), 0) if "C" in layout else row[None]
    places = channels.reshape(len(channels), -1)
    if pool in ("cls", "last"):
        return places[:, 0 if pool == "cls" else -1]
    kept = places if pool == "mean_all" else places[:, info.prefix :]
    if pool == "max":
        return kept.max(-1)
    return kept.mean(-1) if pool in ("mean", "mean_all") else (np.clip(kept, 1e-6, None) ** 3).mean(-1) ** (1 / 3)


def check(found: ReducedTensor, capture: Capture, truth: Array, rows: int) -> None:
    values = found.values
    assert tuple(values.shape) == capture.shape(rows) == truth.shape
    assert str(values.dtype) == f"torch.{capture.dtype}"
    assert values.is_contiguous()
    assert (found.scale is not None) == (capture.dtype == "int8" and capture.is_float)
    numbers, loss = values.to(torch.float64).numpy(), 2e-3 if capture.dtype == "float16" else 1e-4
    if found.scale is not None:
        heads = truth.reshape(len(truth), -1) if truth.ndim else truth.reshape(1, 1)
        np.testing.assert_allclose(found.scale.numpy(), np.abs(heads).max(-1) / 127, rtol=1e-3, atol=1e-6)
        scale = found.scale.to(torch.float64).numpy().reshape(-1, *[1] * (truth.ndim - 1))
        assert (np.abs(numbers * scale - truth) <= scale * 0.51 + 1e-4).all()
    else:
        np.testing.assert_allclose(numbers, truth, rtol=loss, atol=loss / 10)


def offline(model: LoadedModel, guest: Guest) -> dict[Capture, Array]:
    seen = see(model, guest.rows)
    points = {capture: capture.point for capture in guest.captures}
    return {
        capture: expected(seen[point.layer, point.call, point.path, point.site], capture)
        for capture, point in points.items()
    }


def check_all(model: LoadedModel, guests: Sequence[Guest], found: Sequence[Mapping[Capture, ReducedTensor]]) -> None:
    for guest, mine in zip(guests, found, strict=True):
        truth = offline(model, guest)
        assert mine.keys() == guest.captures
        for capture, reduced in mine.items():
            check(reduced, capture, truth[capture], len(guest))


def company(model: LoadedModel, seed: int, sizes: Sequence[int] = (2, 1, 3, 1, 1)) -> list[Guest]:
    """Guests of several rows each: neighbours want some of the same, the third wants nothing that another wants."""
    dice = random.Random(seed)
    found = tensors_of(model)
    dice.shuffle(found)
    own, others = found[::5], [item for place, item in enumerate(found) if place % 5]
    shared = some(model, dice, 8, others)
    guests = []
    for place, size in enumerate(sizes):
        wanted = some(model, dice, 12, own) if place == 2 else shared | some(model, dice, 12, others)
        guests.append(Guest(batch(model.inputs, size, seed=seed + place), frozenset(wanted)))
    return guests


@pytest.mark.parametrize("name", NETS)
def test_each_gets_what_an_offline_hook_gives(load_net: Loader, name: str) -> None:
    """Of one forward for five requests each gets what independent hooks see in a forward of its own rows."""
    model = load_net(name)
    guests = company(model, 100)
    assert guests[2].captures
    assert not guests[2].captures & (guests[1].captures | guests[3].captures)
    assert guests[0].captures & guests[1].captures or not guests[0].captures
    check_all(model, guests, together(model, guests))
    assert model.hooks == 0


# Neighbours


def bits(reduced: ReducedTensor) -> tuple[bytes, bytes | None]:
    """Every bit: signs of zeros and what is written in NaNs too."""
    scale = reduced.scale.numpy().tobytes() if reduced.scale is not None else None
    return reduced.values.numpy().tobytes(), scale


def every_way(model: LoadedModel) -> list[Capture]:
    """All reductions of a few tensors of every kind."""
    kinds: dict[object, tuple[Point, TensorInfo]] = {}
    for point, info in tensors_of(model):
        kinds[point.site, info.layout, info.row_axis, info.entries_per_row, info.dtype] = (point, info)
    stats = Reduction(stats=STATS)
    return [
        Capture(point, info, how)
        for point, info in kinds.values()
        for how in (*ways(info), *([stats] if info.row_axis is not None else []))
    ]


def beside(
    model: LoadedModel, mine: Guest, rows: int, before: int, others: Callable[[int], Guest]
) -> dict[Capture, ReducedTensor]:
    """What a request gets in a forward of so many rows, some of them before its own."""
    sizes = (before, rows - before - len(mine))
    first, last = ([others(size)] if size else [] for size in sizes)
    return together(model, [*first, mine, *last])[len(first)]


def differing(one: dict[Capture, ReducedTensor], other: dict[Capture, ReducedTensor]) -> list[Capture]:
    assert one.keys() == other.keys()
    return [capture for capture, found in one.items() if bits(found) != bits(other[capture])]


@pytest.mark.parametrize("name", ["resnet", "swin", "TimeFirst", "Keywords"])
def test_neighbours_change_no_bit(load_net: Loader, name: str) -> None:
    """Whatever the others send and ask for, in a forward of as many rows a request's bits stay the same."""
    model = load_net(name)
    wanted = every_way(model)
    mine = Guest(batch(model.inputs, 2, seed=5), frozenset(wanted))

    def loud(rows: int) -> Guest:
        sent = {
            key: value * 1e30 if value.is_floating_point() else value
            for key, value in batch(model.inputs, rows, seed=rows).items()
        }
        sent |= {
            key: value.contiguous(memory_format=torch.channels_last) for key, value in sent.items() if value.ndim == 4
        }
        return Guest(sent, frozenset(wanted[rows::3]))

    for before in (0, 1, 4):
        quiet = beside(model, mine, 6, before, lambda rows: Guest(batch(model.inputs, rows, seed=0), frozenset()))
        assert quiet.keys() == mine.captures
        assert differing(quiet, beside(model, mine, 6, before, loud)) == []


def test_padded_bits(load_net: Loader) -> None:
    """In forwards of one size a row's bits are the same alone, in any company, and at any place."""
    model, size = load_net("resnet"), 5
    if not model.is_batch_invariant(size):
        pytest.skip("this machine's kernels give another result at another place in a batch")
    mine = Guest(batch(model.inputs, 1, seed=3), frozenset(every_way(model)[::3]))
    (alone,) = together(model, [mine], padded=size)
    for before in (0, 2, 4):
        among = beside(model, mine, size, before, lambda rows: Guest(batch(model.inputs, rows, seed=10), mine.captures))
        assert differing(alone, among) == []


# Padding


@pytest.mark.parametrize("name", ["resnet", "TimeFirst", "Keywords"])
@pytest.mark.parametrize("sizes", [(2, 1), (5, 4)])
def test_padded(load_net: Loader, name: str, sizes: tuple[int, ...]) -> None:
    """A forward of as many rows as it must have, and answers only for those that were sent."""
    model = load_net(name)
    guests = company(model, 7, sizes)
    seen: list[set[int]] = []
    with model.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append({len(each) for each in (*args, *kwargs.values())}), with_kwargs=True
    ):
        found = together(model, guests, padded=8)
    assert seen == [{max(8, sum(sizes))}]
    check_all(model, guests, found)


# To a device and back


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_is_the_forwards_own(count: int) -> None:
    """Rows of any memory format are one contiguous batch; what is written to it reaches no sender."""
    rows = torch.arange(24.0).reshape(2, 3, 2, 2)
    sent = [rows.clone(memory_format=torch.channels_last) for _ in range(count)]
    made = to_device(sent, torch.float32, torch.device("cpu"))
    assert made.is_contiguous()
    assert torch.equal(made, torch.cat(sent))
    made.zero_()
    assert all(torch.equal(each, rows) for each in sent)


def test_packed() -> None:
    """Tensors of any sizes and dtypes come back out of one, bit for bit, also those that were not contiguous."""
    whole = torch.randint(0, 256, (3, 80), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    dtypes = (torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)
    tensors = [*(whole.view(dtype) for dtype in dtypes), whole > 99, whole.mT, whole[:, :0], torch.tensor(3.0)]
    data = pack(tensors)
    assert (data.dtype, data.ndim) == (torch.uint8, 1)
    assert data.nbytes == sum(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)
    for back, each in zip(unpack(data, tensors), tensors, strict=True):
        assert (back.dtype, back.shape) == (each.dtype, each.shape)
        assert back.is_contiguous()
        both = [value.contiguous().reshape(-1).view(torch.uint8) for value in (back, each)]
        assert torch.equal(*both)
