"""Checkpoints in, digests out."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torchvision.models import mnasnet0_5

from layertap.models.errors import LoadError
from layertap.models.sources.grammar import parse_weights
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.state_dict import digest_weights, load_state_dict


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("narrow", torch.randn(4, 3).to(torch.bfloat16))
        self.register_buffer("index", torch.arange(6).reshape(2, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scalar", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 2))


def refused(path: Path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        read_checkpoint(path)
    assert "/" not in caught.value.detail + caught.value.hint
    assert str(path.parent) not in caught.value.detail
    return caught.value


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_round_trip_of_both_kinds(tmp_path: Path) -> None:
    """What was saved as .safetensors, .pth or .pt comes back with the same names, dtypes and bits."""
    state = Mixed().state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pth")
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "a.pth", "a.pt"):
        assert same(read_checkpoint(tmp_path / name), state), name


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_nesting_and_prefix_are_taken_off(tmp_path: Path, key: str) -> None:
    """A training script's dictionary and DataParallel's ``module.`` give way to the plain names."""
    state = nn.DataParallel(Mixed()).state_dict()
    torch.save({key: state, "epoch": 3}, tmp_path / "run.pth")
    loaded = read_checkpoint(tmp_path / "run.pth")
    assert list(loaded) == list(Mixed().state_dict())
    load_state_dict(Mixed(), loaded, "run.pth")


def test_prefix_stays_where_not_every_name_has_it(tmp_path: Path) -> None:
    """A model that has a part called ``module`` keeps its names."""
    state = {"module.weight": torch.zeros(1), "head": torch.zeros(1)}
    torch.save(state, tmp_path / "a.pth")
    assert read_checkpoint(tmp_path / "a.pth").keys() == state.keys()


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    """A checkpoint that would run code when unpickled raises LoadError, and the code has not run."""
    marker = tmp_path / "ran"
    torch.save({"a": torch.zeros(1), "b": Trap(marker)}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    assert "'x.pth'" in refused(tmp_path / "x.pth").detail
    assert not marker.exists()


def test_plain_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    """A bare pickle under a .pth name is no better."""
    marker = tmp_path / "ran"
    (tmp_path / "x.pth").write_bytes(pickle.dumps(Trap(marker)))
    refused(tmp_path / "x.pth")
    assert not marker.exists()


def test_whole_module_is_refused(tmp_path: Path) -> None:
    """A pickled module, rather than its state dict, raises LoadError that says what to save instead."""
    torch.save(nn.Linear(1, 1), tmp_path / "x.pth")
    assert "state_dict()" in refused(tmp_path / "x.pth").hint


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"a": 1}, {1: torch.zeros(1)}, torch.zeros(1)], ids=str)
def test_content_without_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    """Anything but a dictionary of named tensors raises LoadError."""
    torch.save(content, tmp_path / "x.pth")
    refused(tmp_path / "x.pth")


@pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.safetensors", "x.bin", "x.onnx", "x"])
def test_junk_absence_and_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    """Bytes that are no checkpoint, a missing file, a directory and an unknown ending each raise LoadError."""
    assert name in refused(tmp_path / name).detail
    (tmp_path / name).write_bytes(b"junk" * 100)
    refused(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused(tmp_path / name)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    """A download that broke off raises LoadError."""
    buffer = io.BytesIO()
    torch.save(Mixed().state_dict(), buffer)
    (tmp_path / "x.pth").write_bytes(buffer.getvalue()[:-100])
    refused(tmp_path / "x.pth")
    save_file(Mixed().state_dict(), tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-10])
    refused(tmp_path / "x.safetensors")


def test_misfit_names_what_differs() -> None:
    """A state dict that does not fit names a few missing, unexpected and mis-shaped tensors, and counts the rest."""
    state = {f"layer{index}": torch.zeros(1) for index in range(5)} | {"linear.weight": torch.zeros(7, 3)}
    with pytest.raises(LoadError) as caught:
        load_state_dict(Mixed(), state, "x.pth")
    for part in (
        "'x.pth'",
        "missing: 'narrow', 'index', 'mask' and 8 more",
        "'layer2' and 2 more",
        "'linear.weight' is (7, 3), not (2, 3)",
    ):
        assert part in caught.value.detail
    assert "/" not in caught.value.detail + caught.value.hint


def test_module_keeps_its_dtypes() -> None:
    """Loading half-precision values leaves float parameters float32 and integer buffers integer and exact."""
    source, target = Mixed(), Mixed()
    state = {
        name: value.half() if value.dtype == torch.float32 else value for name, value in source.state_dict().items()
    }
    state["norm.num_batches_tracked"] = torch.tensor(2**40 + 1)
    load_state_dict(target, state, "x.pth")
    assert {name: value.dtype for name, value in target.state_dict().items()} == {
        name: value.dtype for name, value in source.state_dict().items()
    }
    assert int(target.norm.num_batches_tracked or 0) == 2**40 + 1


def test_class_that_insists_on_its_version_loads_from_safetensors(tmp_path: Path) -> None:
    """The MNASNet of torchvision refuses tensors without a class version; safetensors ones load all the same."""
    module = mnasnet0_5()
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    other = mnasnet0_5()
    load_state_dict(other, read_checkpoint(tmp_path / "m.safetensors"), "m.safetensors")
    assert digest_weights(other) == digest_weights(module)


def test_digest_is_of_the_weights_not_of_the_way_there(tmp_path: Path) -> None:
    """Modules that got equal weights by construction, .safetensors or .pth have one digest, in any memory format."""
    module = Mixed()
    save_file(module.state_dict(), tmp_path / "a.safetensors")
    torch.save(module.state_dict(), tmp_path / "a.pth")
    for name in ("a.safetensors", "a.pth"):
        other = Mixed()
        assert digest_weights(other) != digest_weights(module)
        load_state_dict(other, read_checkpoint(tmp_path / name), name)
        assert digest_weights(other) == digest_weights(module)
    conv = nn.Conv2d(3, 4, 3)
    assert digest_weights(copy.deepcopy(conv).to(memory_format=torch.channels_last)) == digest_weights(conv)


def test_digest_is_what_its_description_says() -> None:
    """The digest can be computed by hand: JSON of name, dtype and shape, then little-endian bytes, by name."""
    module = nn.Module()
    module.register_buffer("b", torch.tensor([[1.5, -2.0]]))
    module.register_buffer("a", torch.tensor(3))
    expected = hashlib.sha256()
    expected.update(json.dumps(["a", "int64", []]).encode() + struct.pack("<q", 3))
    expected.update(json.dumps(["b", "float32", [1, 2]]).encode() + struct.pack("<2f", 1.5, -2.0))
    assert digest_weights(module) == expected.hexdigest()


def test_digest_sees_every_bit() -> None:
    """Turning over the lowest bit of any one tensor, of any dtype, changes the digest."""
    module = Mixed()
    digests = {digest_weights(module)}
    filled = [name for name, value in module.state_dict().items() if value.numel()]
    for name in filled:
        changed = copy.deepcopy(module)
        value = changed.state_dict()[name]
        value.reshape(-1)[-1:].view(torch.uint8)[0] ^= 1
        digests.add(digest_weights(changed))
    assert len(digests) == 1 + len(filled)


def test_digest_sees_names_shapes_and_dtypes() -> None:
    """Equal bytes under another name, in another shape or of another dtype have another digest."""

    def one(name: str, value: Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, value)
        return digest_weights(module)

    zeros = torch.zeros(4)
    variants = [("a", zeros), ("b", zeros), ("a", zeros.view(2, 2)), ("a", zeros.int()), ("a", torch.zeros(2, 0))]
    assert len({one(name, value) for name, value in variants}) == len(variants)


def test_origin_of_weights() -> None:
    """A configuration's text is a seed, a checkpoint or a name, and its label holds no directory."""
    assert parse_weights("random:7").seed == 7
    assert parse_weights("some/where/x.safetensors").path == Path("some/where/x.safetensors")
    assert parse_weights("some/where/x.PTH").label == "x.PTH"
    assert parse_weights("DEFAULT").label == parse_weights("DEFAULT").label
    assert (parse_weights("DEFAULT").seed, parse_weights("DEFAULT").path) == (None, None)
    assert parse_weights("ResNet50_Weights.IMAGENET1K_V2").path is None


@pytest.mark.parametrize("text", ["random:", "random:x", "random:-1", "random:1.5", f"random:{2**64}", "some/x.onnx"])
def test_origin_refuses(text: str) -> None:
    """A seed that is no whole number in range, and a file of an unknown kind, raise LoadError."""
    with pytest.raises(LoadError) as caught:
        parse_weights(text)
    assert "/" not in caught.value.detail + caught.value.hint


class Tied(nn.Module):
    """Three layers of which two are one, and a fourth that has the first's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 3, bias=False)
        self.again = self.first
        self.head.weight = self.first.weight


@pytest.mark.parametrize("kind", ["save_model", "no metadata", "pth", "parallel"])
def test_shared_weights_that_were_saved_once(tmp_path: Path, kind: str) -> None:
    """A file with one name of each shared tensor, as safetensors' save_model writes it, fits its module."""
    saved, module = Tied(), Tied()
    file = tmp_path / f"tied.{'pth' if kind == 'pth' else 'safetensors'}"
    once = dict(saved.named_parameters())
    assert len(once) < len(saved.state_dict())
    if kind == "pth":
        torch.save(once, file)
    elif kind == "no metadata":
        save_file(once, file)
    else:
        save_model(nn.ModuleDict({"module": saved}) if kind == "parallel" else saved, str(file))
    load_state_dict(module, read_checkpoint(file), "w")
    assert digest_weights(module) == digest_weights(saved)


def test_shared_weights_that_only_the_file_tells_of(tmp_path: Path) -> None:
    """What save_model left out is taken from what it names, also where the module has tensors of its own there."""
    saved, module = Tied(), Tied()
    module.again, module.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    save_model(saved, str(tmp_path / "tied.safetensors"))
    load_state_dict(module, read_checkpoint(tmp_path / "tied.safetensors"), "w")
    assert digest_weights(module) == digest_weights(saved)


@pytest.mark.parametrize("missing", ["last.weight", "first"])
def test_a_weight_that_no_name_of_a_file_has(tmp_path: Path, missing: str) -> None:
    """Shared weights excuse nothing: what is under none of its names is missing."""
    once = {name: value for name, value in Tied().named_parameters() if not name.startswith(missing)}
    save_file(once, tmp_path / "tied.safetensors", {"last.weight": "none", "first.weight": "head.weight"})
    with pytest.raises(LoadError, match=f"missing: .*{missing}"):
        load_state_dict(Tied(), read_checkpoint(tmp_path / "tied.safetensors"), "w")


def test_two_tensors_for_one() -> None:
    """A file with different tensors for what the module shares is refused by the names of both; equal ones do."""
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    load_state_dict(Tied(), state, "w")
    state["head.weight"] += 1
    with pytest.raises(LoadError, match=r"one tensor for '\w+\.weight' and '\w+\.weight', 'w' has two") as caught:
        load_state_dict(Tied(), state, "w")
    assert "again" not in caught.value.hint


class Noted(nn.Linear):
    """Keeps a note beside its weights."""

    def get_extra_state(self) -> Any:
        return {"note": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"note": 1}


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: Noted(2, 3)], ids=["lazy", "extra state"])
def test_what_has_no_values_to_compare(make: Any) -> None:
    """Parameters without a shape yet, and what a module keeps beside tensors, load as load_state_dict has it."""
    saved = nn.Sequential(Noted(2, 3))
    state = saved.state_dict()
    if isinstance(make(), nn.LazyLinear):
        state.pop("0._extra_state")
    module = nn.Sequential(make())
    load_state_dict(module, state, "w")
    assert torch.equal(module.state_dict()["0.weight"], saved.state_dict()["0.weight"])


class Doubling(nn.Linear):
    """Makes something of its own of what is loaded into it."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}weight": 2 * state[f"{prefix}weight"]}, prefix, *rest)  # type: ignore[no-untyped-call]


def test_values_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not hold a file's values, or only rounded ones, is refused; one that changes them is not."""
    state = nn.Linear(3, 2).state_dict()
    state["bias"][0] = math.nan  # equal to itself here
    load_state_dict(nn.Linear(3, 2), state, "w", min_bits=32)
    load_state_dict(nn.Linear(3, 2).bfloat16(), state, "w")
    with pytest.raises(LoadError, match=r"does not hold the weights of 'w': 'bias', 'weight'"):
        load_state_dict(nn.Linear(3, 2).bfloat16(), state, "w", min_bits=32)
    doubling = nn.Sequential(Doubling(3, 2))
    load_state_dict(doubling, {f"0.{name}": value for name, value in state.items()}, "w")
    assert torch.equal(doubling[0].weight, 2 * state["weight"])
    usual = nn.Module.load_state_dict

    def load(self: nn.Module, *args: Any, **options: Any) -> Any:
        done = usual(self, *args, **options)
        next(self.parameters()).data.view(-1)[0] += 1e-6
        return done

    load.__module__ = usual.__module__
    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    with pytest.raises(LoadError, match="does not hold the weights"):
        load_state_dict(nn.Linear(3, 2), state, "w")
