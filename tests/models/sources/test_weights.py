"""Checkpoints in, digests out."""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import io
import json
import math
import pickle
import runpy
import struct
from collections import deque
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.sources.checkpoints import read_checkpoint
from layertap.models.sources.state_dict import digest_weights, load_state_dict
from layertap.models.spec import ModelSpec


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


def refusal(act: Callable[[], object]) -> LoadError:
    with pytest.raises(LoadError) as caught:
        act()
    return caught.value


def refused(path: Path) -> LoadError:
    error = refusal(lambda: read_checkpoint(path))
    assert "/" not in error.detail + error.hint
    return error


def test_round_trip_of_both_kinds(tmp_path: Path) -> None:
    """What was saved as .safetensors, .pth or .pt comes back with the same names, dtypes, bits and digest.

    The digest is of the weights, in any memory format.
    """
    module = Mixed()
    state = module.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pth")
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "a.pth", "a.pt"):
        found, other = read_checkpoint(tmp_path / name), Mixed()
        assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in state.items()}
        assert all(torch.equal(value, state[key]) for key, value in found.items())
        assert digest_weights(other) != digest_weights(module)
        load_state_dict(other, found, name)
        assert digest_weights(other) == digest_weights(module)
    conv = nn.Conv2d(3, 4, 3)
    assert digest_weights(copy.deepcopy(conv).to(memory_format=torch.channels_last)) == digest_weights(conv)


def touch(name: str) -> None:
    Path(name).touch()


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, ...]:
        return touch, (self.marker,)


@pytest.mark.parametrize("form", ["zipped", "legacy", "plain pickle"])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    """A checkpoint that would run code when unpickled raises LoadError, and the code has not run."""
    marker = tmp_path / "ran"
    content = {"a": torch.zeros(1), "b": Trap(marker)}
    if form == "plain pickle":
        (tmp_path / "x.pth").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=form == "zipped")
    assert "'x.pth'" in refused(tmp_path / "x.pth").detail
    assert not marker.exists()


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"a": 1}, {1: torch.zeros(1)}, torch.zeros(1)], ids=str)
def test_content_without_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    """Anything but a dictionary of named tensors raises LoadError."""
    torch.save(content, tmp_path / "x.pth")
    refused(tmp_path / "x.pth")


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors", "x.onnx", "x"])
def test_junk_absence_and_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    """Bytes that are none, or half of one, a missing file, a directory and an unknown ending each raise LoadError."""
    assert name in refused(tmp_path / name).detail
    buffer = io.BytesIO()
    torch.save(Mixed().state_dict(), buffer)
    for data in (b"junk" * 100, buffer.getvalue()[:-100]):
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused(tmp_path / name)


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


class Tied(nn.Module):
    """Three layers of which two are one, and a fourth that has the first's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 3, bias=False)
        self.again = self.first
        self.head.weight = self.first.weight


@pytest.mark.parametrize("kind", ["save_model", "pth", "parallel"])
def test_shared_weights_that_were_saved_once(tmp_path: Path, kind: str) -> None:
    """A file with one name of each shared tensor, as safetensors' save_model writes it, fits its module."""
    saved, module = Tied(), Tied()
    file = tmp_path / f"tied.{'pth' if kind == 'pth' else 'safetensors'}"
    once = dict(saved.named_parameters())
    assert len(once) < len(saved.state_dict())
    if kind == "pth":
        torch.save(once, file)
    else:
        save_model(nn.ModuleDict({"module": saved}) if kind == "parallel" else saved, str(file))
    load_state_dict(module, read_checkpoint(file), "w")
    assert digest_weights(module) == digest_weights(saved)


@pytest.mark.parametrize("missing", ["last.weight", "first"])
def test_a_weight_that_no_name_of_a_file_has(tmp_path: Path, missing: str) -> None:
    """Shared weights excuse nothing: what is under none of its names is missing."""
    once = {name: value for name, value in Tied().named_parameters() if not name.startswith(missing)}
    save_file(once, tmp_path / "tied.safetensors", {"last.weight": "none", "first.weight": "head.weight"})
    with pytest.raises(LoadError, match=f"missing: .*{missing}"):
        load_state_dict(Tied(), read_checkpoint(tmp_path / "tied.safetensors"), "w")


def test_values_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not hold a file's values, or only rounded ones, is refused."""
    state = nn.Linear(3, 2).state_dict()
    state["bias"][0] = math.nan  # equal to itself here
    load_state_dict(nn.Linear(3, 2), state, "w", min_bits=32)
    load_state_dict(nn.Linear(3, 2).bfloat16(), state, "w")
    with pytest.raises(LoadError, match=r"does not hold the weights of 'w': 'bias', 'weight'"):
        load_state_dict(nn.Linear(3, 2).bfloat16(), state, "w", min_bits=32)
    usual = nn.Module.load_state_dict

    def load(self: nn.Module, *args: Any, **options: Any) -> Any:
        done = usual(self, *args, **options)
        next(self.parameters()).data.view(-1)[0] += 1e-6
        return done

    load.__module__ = usual.__module__
    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    with pytest.raises(LoadError, match="does not hold the weights"):
        load_state_dict(nn.Linear(3, 2), state, "w")


def state(value: float = 0.0) -> dict[str, Tensor]:
    """What fits ``nn.Linear(2, 3)``."""
    return {"weight": torch.full((3, 2), value), "bias": torch.full((3,), value)}


def before(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def saved(folder: Path, content: object) -> Path:
    torch.save(content, folder / "x.pth")
    return folder / "x.pth"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": state(), "ema": state(1)}, "ema"),
        ({"state_dict": state(), "ema_state_dict": state(1)}, "ema_state_dict"),
        ({"state_dict": state(1), "ema_state_dict": state(), "message_hub": {}}, "state_dict"),
        ({"model": state(1), "ema": {"decay": 0.9, "shadow_params": [torch.zeros(1)]}}, "model"),
        ({"model": {"state_dict": state(1)}, "module": 3}, "model.state_dict"),
        ({"optimizer": {"state": {0: state()}}, "network": state(1)}, "network"),
    ],
    ids=str,
)
def test_one_of_several_dictionaries(tmp_path: Path, content: object, key: str) -> None:
    """Averaged weights come first, but for MMEngine's, whose state_dict is the averaged one; the rest is unread."""
    found = read_checkpoint(saved(tmp_path, content))
    assert found.key == key
    assert all(torch.equal(value, torch.ones_like(value)) for value in found.values())
    assert list(found) == ["weight", "bias"]


@pytest.mark.parametrize("prefix", ["model.", "model", "best.a"])
def test_prefix_is_of_names_as_they_stand_in_the_file(tmp_path: Path, prefix: str) -> None:
    """A prefix may name dictionaries, how names begin, or the one and then the other; its last dot is no matter."""
    content = {"model": before("a.", state(1)), "best": before("a.", state(1)), "ema": before("model.", state())}
    module = nn.Linear(2, 3)
    load_state_dict(module, read_checkpoint(saved(tmp_path, content), prefix), "x.pth")
    assert torch.equal(module.bias, torch.ones(3))


@pytest.mark.parametrize(
    "content",
    [{"encoder": state(), "decoder": state(), "epoch": 1}, before("encoder.", state()) | before("decoder.", state(1))],
    ids=["keys", "prefixes"],
)
def test_two_models_in_one(tmp_path: Path, content: object) -> None:
    """Where two prefixes do as well none is chosen; the refusal says what to type."""
    error = refusal(lambda: load_state_dict(nn.Linear(2, 3), read_checkpoint(saved(tmp_path, content)), "x.pth"))
    assert error.hint == "type prefix: 'encoder.' or 'decoder.'"


def test_not_strict_takes_what_fits_and_says_so(tmp_path: Path) -> None:
    """Strictly, the error has the names on both sides and the line to type; otherwise the report has them.

    Another shape is refused all the same, and so is a file of which nothing fits.
    """
    tensors = {"weight": torch.ones(3, 2), "extra": torch.ones(1)}
    error = refusal(lambda: load_state_dict(nn.Linear(2, 3), tensors, "x.pth"))
    assert "missing: 'bias'" in error.detail
    assert "unexpected: 'extra'" in error.detail
    assert "type strict: false" in error.hint
    module = nn.Linear(2, 3)
    report = load_state_dict(module, tensors, "x.pth", strict=False)
    assert (report.missing, report.left_over) == (("bias",), ("extra",))
    assert torch.equal(module.weight, torch.ones(3, 2))
    for other in ({"weight": torch.ones(4, 2)}, {"other": torch.ones(1)}):
        refusal(lambda other=other: load_state_dict(nn.Linear(2, 3), other, "x.pth", strict=False))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("renamed", "hint"),
    [
        ({"1.weight": "fc.weight"}, "rename 'fc.weight' to '1.weight' in the file"),
        ({"0.weight": "0.gamma", "0.bias": "0.beta"}, "rename '0.beta' to '0.bias' in the file"),
    ],
    ids=str,
)
def test_names_that_look_alike_are_paired(renamed: dict[str, str], hint: str) -> None:
    """Where what is missing looks like what is left over, the hint pairs them, and is never to draw at random."""
    module = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3))
    tensors = {renamed.get(name, name): value for name, value in module.state_dict().items()}
    error = refusal(lambda: load_state_dict(module, tensors, "x.pth"))
    assert hint in error.hint
    assert "strict" not in error.hint


def test_objects_beside_the_tensors_are_not_made(tmp_path: Path) -> None:
    """What scripts keep beside tensors needs no class of theirs, and code that is there does not run."""
    marker = tmp_path / "ran"
    args = argparse.Namespace(lr=np.float64(1), path=Path("x"), size=torch.Size([1]), date=date(2024, 1, 1))
    others = [nn.Linear(1, 1), functools.partial(int, base=2), deque([1]), np.arange(3), b"bytes", slice(1), {1: {2}}]
    content = {"config": others, "model": state(1), "args": args, "hook": Trap(marker)}
    found = read_checkpoint(saved(tmp_path, content))
    assert (list(found), found.unread) == (["weight", "bias"], ("config", "args", "hook"))
    assert not marker.exists()
    torch.load(tmp_path / "x.pth", weights_only=False)
    assert marker.exists()


def scripted(folder: Path, module: nn.Module) -> Path:
    """A TorchScript archive."""
    torch.jit.trace(module, torch.ones(1, 2)).save(folder / "x.pt")
    return folder / "x.pt"


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("save", "words"),
    [
        (saved, "'torch.nn.modules.linear.Linear'"),
        (lambda folder, module: saved(folder, {"model": module, "epoch": 1}), "'torch.nn.modules.linear.Linear'"),
        (scripted, "'x.pt' is a TorchScript archive"),
    ],
    ids=["", "model", "scripted"],
)
def test_modules_that_are_code_are_refused_with_what_converts_them(
    tmp_path: Path, save: Callable[[Path, nn.Module], Path], words: str
) -> None:
    """The class is named, nothing runs, and the lines of the hint make a file that is read."""
    module = nn.Linear(2, 3)
    path = save(tmp_path, module)
    error = refusal(lambda: read_checkpoint(path))
    assert words in error.detail
    lines = error.hint.partition(": ")[2].replace("FILE", str(path)).replace("weights.pth", str(tmp_path / "w.pth"))
    assert len(lines.split("; ")) == 3
    (tmp_path / "convert.py").write_text(lines)
    runpy.run_path(str(tmp_path / "convert.py"))
    assert torch.equal(read_checkpoint(tmp_path / "w.pth")["weight"], module.weight)


def shards(folder: Path, **files: str) -> Path:
    """Two shards and an index that names what is given."""
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def test_shards_of_an_index_and_of_its_folder(tmp_path: Path) -> None:
    """Both give the tensors of all shards."""
    index = shards(tmp_path, a="one.safetensors", b="two.safetensors")
    for path in (index, tmp_path):
        assert {name: value.tolist() for name, value in read_checkpoint(path).items()} == {"a": [1], "b": [1, 1]}


def test_shards_that_are_not_whole(tmp_path: Path) -> None:
    """A shard that is not there, lacks a tensor or lies elsewhere than beside its index is refused, and named."""
    assert "'three.safetensors'" in refused(shards(tmp_path, a="one.safetensors", b="three.safetensors")).detail
    assert "'one.safetensors' lacks" in refused(shards(tmp_path, a="one.safetensors", b="one.safetensors")).detail
    (tmp_path / "x").mkdir()
    shards(tmp_path / "x", a="one.safetensors")
    for name in ("../one.safetensors", "/one.safetensors", "x/one.safetensors"):
        assert "beside it" in refused(shards(tmp_path, a=name)).detail


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "transformers:"),
        ({"architecture": "no_such_net"}, "no_such_net"),
        ({"architecture": 3}, "timm:FOLDER/"),
    ],
    ids=str,
)
def test_folder_that_is_not_of_timm(tmp_path: Path, config: object, words: str) -> None:
    """A config.json of another library, of an unknown architecture, or nonsense: the refusal says what to do."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError) as caught:
        build_model(ModelSpec("m", f"timm:{tmp_path}/"))
    assert words in f"{caught.value.detail} {caught.value.hint}"
    assert str(tmp_path.parent) not in f"{caught.value.detail} {caught.value.hint}"
