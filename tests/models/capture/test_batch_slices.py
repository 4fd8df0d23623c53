"""Several requests in one forward: each gets its own rows' tensors, whoever the others are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.capture.batch_slices import JoinedRows, RequestSlice, find_spans
from layertap.models.capture.reduction import ReducedTensor, reduce
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.devices.transfer import ALIGNMENT, pack, unpack
from layertap.models.errors import OutOfMemoryError
from layertap.models.hooks.sites import Site
from layertap.models.loaded_model import LoadedModel
from layertap.models.selection.hook_points import HookPoint, Pool, Reduction, ReplyDType
from layertap.models.selection.plan import Capture
from layertap.models.selection.poolings import POOLINGS
from tests.conftest import net_spec
from tests.loading import load_model
from tests.models.extraction import list_tensors, see
from tests.nets import batch

Array = NDArray[Any]
Net = Callable[..., LoadedModel]
POOLS: tuple[Pool, ...] = tuple(POOLINGS)
DTYPES: tuple[ReplyDType, ...] = get_args(ReplyDType)
# Whole feature maps, tokens, windows folded into the batch, rows on axis 1, structured values, parts that run often.
NETS = (
    *("resnet", "bottlenecks", "vit", "swin", "TimeFirst", "TimeOut", "Windows", "Structured", "Keywords", "Tied"),
    *("NeverCalled", "Inner", "Recursive", "Retries", "Kinds", "Views", "Sound", "Cube", "Writes", "Encoder"),
)


@pytest.fixture(scope="module")
def net() -> Net:
    """Models of ``tests.nets`` by their names, each loaded once."""
    known: dict[str, LoadedModel] = {}

    def loaded(name: str) -> LoadedModel:
        if name not in known:
            known[name] = load_model(net_spec(name))
        return known[name]

    return loaded


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


def tensors_of(model: LoadedModel) -> list[tuple[HookPoint, TensorInfo]]:
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
    model: LoadedModel, dice: random.Random, count: int, found: Sequence[tuple[HookPoint, TensorInfo]]
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
def test_each_gets_what_an_offline_hook_gives(net: Net, name: str) -> None:
    """Of one forward for five requests each gets what independent hooks see in a forward of its own rows."""
    model = net(name)
    guests = company(model, 100)
    assert guests[2].captures
    assert not guests[2].captures & (guests[1].captures | guests[3].captures)
    assert guests[0].captures & guests[1].captures or not guests[0].captures
    check_all(model, guests, together(model, guests))
    assert model.hooks == 0


@pytest.mark.parametrize("name", ["vit", "swin", "TimeFirst", "Windows", "Inner", "Kinds"])
def test_every_way_of_one_tensor(net: Net, name: str) -> None:
    """Requests that want the same tensors in every way there is, in one forward."""
    model = net(name)
    found = tensors_of(model)[:: max(len(tensors_of(model)) // 8, 1)]
    every = [Capture(point, info, how) for point, info in found for how in ways(info)]
    captures = [frozenset(every), frozenset(every[::2]), frozenset(every[1::2])]
    guests = [Guest(batch(model.inputs, 1 + place, seed=place), wanted) for place, wanted in enumerate(captures)]
    check_all(model, guests, together(model, guests))


def at(model: LoadedModel, layer: str, site: Site = "output") -> Capture:
    point, info = next(item for item in tensors_of(model) if (item[0].layer, item[0].site) == (layer, site))
    return Capture(point, info, Reduction())


# Neighbours


def bits(reduced: ReducedTensor) -> tuple[bytes, bytes | None]:
    """Every bit: signs of zeros and what is written in NaNs too."""
    scale = reduced.scale.numpy().tobytes() if reduced.scale is not None else None
    return reduced.values.numpy().tobytes(), scale


def every_way(model: LoadedModel) -> list[Capture]:
    """All reductions of a few tensors of every kind."""
    kinds: dict[object, tuple[HookPoint, TensorInfo]] = {}
    for point, info in tensors_of(model):
        kinds[point.site, info.layout, info.row_axis, info.entries_per_row, info.dtype] = (point, info)
    return [Capture(point, info, how) for point, info in kinds.values() for how in ways(info)]


ROWS = 6
LOUD = (0.0, 1.0, 1e4, 1e30)


@pytest.mark.parametrize("name", ["resnet", "vit", "swin", "TimeFirst", "Windows", "Keywords"])
@settings(max_examples=12)
@given(data=st.data())
def test_neighbours_change_no_bit(net: Net, name: str, data: st.DataObject) -> None:
    """Whatever the others send and ask for, in a forward of as many rows a request's bits stay the same."""
    model, wanted = net(name), every_way(net(name))
    mine = Guest(batch(model.inputs, 2, seed=5), frozenset(wanted))
    before = data.draw(st.integers(0, ROWS - 2), "rows before")
    after = ROWS - 2 - before

    def neighbour(rows: int) -> Guest:
        seed, loud = data.draw(st.integers(3, 9), "seed"), data.draw(st.sampled_from(LOUD), "loud")
        sent = {
            key: value * loud if value.is_floating_point() else value
            for key, value in batch(model.inputs, rows, seed).items()
        }
        if data.draw(st.booleans(), "channels last"):
            sent = {key: _channels_last(value) for key, value in sent.items()}
        return Guest(sent, frozenset(data.draw(st.lists(st.sampled_from(wanted)), "wants")))

    def sizes(rows: int) -> list[int]:
        cut = data.draw(st.integers(0, rows), "cut")
        return [size for size in (cut, rows - cut) if size]

    def guests(fill: Callable[[int], Guest]) -> tuple[list[Guest], int]:
        first = [fill(size) for size in sizes(before)]
        return [*first, mine, *(fill(size) for size in sizes(after))], len(first)

    quiet, place = guests(lambda rows: Guest(batch(model.inputs, rows, seed=0), frozenset()))
    lively, other = guests(neighbour)
    alone, among = together(model, quiet)[place], together(model, lively)[other]
    assert alone.keys() == among.keys() == mine.captures
    assert [capture for capture in wanted if bits(alone[capture]) != bits(among[capture])] == []


def _channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def capture_of(info: TensorInfo, **how: Any) -> Capture:
    return Capture(HookPoint("0", 0, (), "output"), info, Reduction(**how))


LAYOUTS = {
    "NCL": TensorInfo((), (1, 13, 7), "float32", layout="NCL"),
    "NTC": TensorInfo((), (1, 7, 13), "float32", layout="NTC", prefix=1),
    "TNC": TensorInfo((), (7, 1, 13), "float32", row_axis=1, layout="TNC", prefix=2),
    "windows": TensorInfo((), (3, 7, 13), "float32", layout="NTC"),
}


def test_more_rows_than_memory_holds(net: Net) -> None:
    """Rows beyond any memory are refused as such, and no hook is left."""
    model = net("Tied")
    wanted = frozenset([at(model, "act")])
    many = {"x": torch.zeros(1, 5).expand(2**46, 5)}  # more than a processor's address space
    with pytest.raises(OutOfMemoryError, match=f"no memory for {2**46} rows"):
        together(model, [Guest(many, wanted)])
    assert model.hooks == 0


# Padding


@pytest.mark.parametrize("name", ["resnet", "swin", "TimeFirst", "Windows", "Keywords", "Inner"])
@pytest.mark.parametrize("sizes", [(2, 1), (5, 4)])
def test_padded(net: Net, name: str, sizes: tuple[int, ...]) -> None:
    """A forward of as many rows as it must have, and answers only for those that were sent."""
    model = net(name)
    guests = company(model, 7, sizes)
    seen: list[set[int]] = []
    handle = model.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append({len(each) for each in (*args, *kwargs.values())}), with_kwargs=True
    )
    try:
        found = together(model, guests, padded=8)
    finally:
        handle.remove()
    assert seen == [{max(8, sum(sizes))}]
    check_all(model, guests, found)


@pytest.mark.parametrize("name", ["resnet", "bottlenecks"])
def test_padded_bits(net: Net, name: str) -> None:
    """In forwards of one size a row's bits are the same alone, in any company, and at any place."""
    model, size = net(name), 5
    if not model.is_batch_invariant(size):
        pytest.skip("this machine's kernels give another result at another place in a batch")
    row, wanted = batch(model.inputs, 1, seed=3), frozenset(every_way(model))
    (alone,) = together(model, [Guest(row, wanted)], padded=size)
    for place in range(size):
        sizes = [part for part in (place, size - 1 - place) if part and (part + place) % 3]
        others = [Guest(batch(model.inputs, part, seed=10 + place), wanted) for part in sizes]
        first = others[: 1 if place and place % 3 else 0]
        guests = [*first, Guest(row, wanted), *others[len(first) :]]
        among = together(model, guests, padded=size)[len(first)]
        assert [capture for capture in wanted if bits(alone[capture]) != bits(among[capture])] == []


# Parts


def shares(*spans: tuple[int, int, set[Capture]]) -> list[RequestSlice]:
    return [RequestSlice(start, stop, frozenset(wanted)) for start, stop, wanted in spans]


def test_spans() -> None:
    """Neighbours that want a copy of the same are taken in one piece, those that want something computed are not."""
    info = LAYOUTS["NTC"]
    copies = {capture_of(info, pool=pool) for pool in ("none", "flatten", "cls")}
    computed = {capture_of(info, pool=pool) for pool in ("mean", "gem", "max")}
    computed |= {capture_of(info, pool="flatten", normalize=True)}
    every = copies | computed
    found = find_spans(shares((3, 4, every), (0, 2, every), (5, 9, every), (2, 3, every), (4, 5, set())), 9)
    assert found.keys() == every
    assert all(found[capture] == ((0, 4), (5, 9)) for capture in copies)
    assert all(found[capture] == ((0, 2), (2, 3), (3, 4), (5, 9)) for capture in computed)


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_joined(name: str, cuts: tuple[int, ...]) -> None:
    """A request's rows of several forwards are those of one, in whatever order these come, and one twice."""
    info = LAYOUTS[name]
    axis, alone = info.row_axis or 0, [torch.randn(info.shape) for _ in range(4)]
    whole = torch.cat(alone, axis)
    spans = [(int(stop) - cut, int(stop)) for cut, stop in zip(cuts, np.cumsum(cuts), strict=True)]
    for how in ways(info):
        capture, joined = capture_of(info, **vars(how)), JoinedRows(4)
        for start, stop in [spans[-1], *spans]:
            found = joined.add(start, stop, {capture: reduce(RowTensor(torch.cat(alone[start:stop], axis), info), how)})
        check(found[capture], capture, expected(whole, capture), 4)
        if not POOLINGS[how.pool].averages and not how.normalize:
            assert bits(found[capture]) == bits(reduce(RowTensor(whole, info), how))


# One copy for all results

PACKED = (
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def anything(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits that a tensor of that dtype may hold."""
    size, generator = torch.empty(shape).numel(), torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(PACKED), SHAPES, st.booleans()), min_size=1, max_size=6), st.integers(0, 99))
def test_packed(kinds: list[tuple[torch.dtype, tuple[int, ...], bool]], seed: int) -> None:
    """Tensors of any sizes and dtypes come back out of one, bit for bit, also those that were not contiguous."""
    tensors = [anything(dtype, shape, seed + place) for place, (dtype, shape, _) in enumerate(kinds)]
    tensors = [
        each.mT if turned and each.ndim > 1 else each for each, (_, _, turned) in zip(tensors, kinds, strict=True)
    ]
    data = pack(tensors)
    assert (data.dtype, data.ndim) == (torch.uint8, 1)
    assert data.nbytes == sum(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)
    found = unpack(data, tensors)
    for back, each in zip(found, tensors, strict=True):
        assert (back.dtype, back.shape) == (each.dtype, each.shape)
        assert back.is_contiguous()
        assert raw(back) == raw(each)
