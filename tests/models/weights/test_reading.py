"""What is read of a checkpoint that holds more than a state dict, what is refused, and what that takes."""

from __future__ import annotations

import argparse
import functools
import runpy
from collections import deque
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.state_dict import load_state_dict


def state(value: float = 0.0) -> dict[str, Tensor]:
    """What fits ``nn.Linear(2, 3)``."""
    return {"weight": torch.full((3, 2), value), "bias": torch.full((3,), value)}


def before(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def saved(folder: Path, content: object) -> Path:
    torch.save(content, folder / "x.pth")
    return folder / "x.pth"


def refusal(act: Callable[[], object]) -> LoadError:
    with pytest.raises(LoadError) as caught:
        act()
    return caught.value


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
    """Strictly, the error has the names on both sides and the line to type; otherwise the report has them."""
    tensors = {"weight": torch.ones(3, 2), "extra": torch.ones(1)}
    error = refusal(lambda: load_state_dict(nn.Linear(2, 3), tensors, "x.pth"))
    assert "missing: 'bias'" in error.detail
    assert "unexpected: 'extra'" in error.detail
    assert "type strict: false" in error.hint
    module = nn.Linear(2, 3)
    report = load_state_dict(module, tensors, "x.pth", strict=False)
    assert (report.missing, report.left_over) == (("bias",), ("extra",))
    assert torch.equal(module.weight, torch.ones(3, 2))


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


@pytest.mark.parametrize("tensors", [{"weight": torch.ones(4, 2)}, {"other": torch.ones(1)}], ids=["shape", "nothing"])
def test_not_strict_has_its_bounds(tensors: dict[str, Tensor]) -> None:
    """Another shape is refused, and so is a file of which nothing fits."""
    refusal(lambda: load_state_dict(nn.Linear(2, 3), tensors, "x.pth", strict=False))


def touch(name: str) -> None:
    Path(name).touch()


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, ...]:
        return touch, (self.marker,)


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
