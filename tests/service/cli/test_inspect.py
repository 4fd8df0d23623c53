"""``inspect``: what is said of a checkpoint, and whether the configuration that it prints serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model

from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import read_configuration
from tests import transformers_nets
from tests.marks import slow
from tests.models.sources import plain_weights
from tests.oracle import seeded
from tests.service.checkpoint_files import before, lightning, train
from tests.service.cli.commands import Command


def configured(text: str, folder: Path, name: str = "models.yaml") -> ModelSpec:
    """The model of a configuration that was printed."""
    (folder / name).write_text(text)
    return read_configuration(folder / name, before_loading=True).models[0]


def digest(module: nn.Module) -> str:
    return plain_weights.digest(plain_weights.tensors(module))


def fine_tuned(folder: Path) -> nn.Module:
    """A checkpoint of Lightning's, with other classes."""
    module = seeded(get_model("squeezenet1_1", num_classes=6), 0)
    state = before("model.", module.state_dict()) | {"loss.weight": torch.ones(6)}
    torch.save(lightning(state, optimizer_states=[train(module)]), folder / "flowers.ckpt")
    return module


def resized(folder: Path) -> nn.Module:
    """Other classes, channels and sizes of pictures."""
    module = seeded(timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=96, in_chans=1), 0)
    torch.save({"model": module.state_dict()}, folder / "vit_tiny_patch16_224-run.pth")
    return module


def folder_of_timm(folder: Path) -> nn.Module:
    module = seeded(timm.create_model("test_vit", num_classes=4), 0)
    timm.models.save_for_hf(module, str(folder / "own"), safe_serialization=True)
    return module


def folder_of_transformers(folder: Path) -> nn.Module:
    module: nn.Module = transformers_nets.saved("vit", folder / "own")
    return module


CASES: dict[str, tuple[Callable[[Path], nn.Module], str, tuple[str, ...]]] = {
    "Lightning": (
        fine_tuned,
        "flowers.ckpt",
        (
            "# flowers.ckpt: 53 tensors",
            "# read: state_dict",
            "# taken off names: model.",
            "optimizer_states",
            'torchvision:squeezenet1_1 with {"num_classes": 6}',
        ),
    ),
    "sizes": (
        resized,
        "vit_tiny_patch16_224-run.pth",
        ("# read: model", "others may compute", "deit_tiny_patch16_224"),
    ),
    "timm's folder": (folder_of_timm, "own", ("# config.json says: timm:own/",)),
    "transformers' folder": (folder_of_transformers, "own", ("# config.json says: transformers:own",)),
}


@pytest.mark.parametrize("case", [case if case.endswith("folder") else slow(case) for case in CASES])
def test_what_is_printed_serves_the_checkpoint(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The output is a configuration, of a model with the weights that were saved; its comments say what was found."""
    make, name, words = CASES[case]
    module = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = command("inspect", name)
    assert done.status == 0, done.notes
    assert [each for each in words if each not in done.out] == []
    assert digest(build_model(configured(done.out, tmp_path)).module) == digest(module)


@pytest.mark.slow
def test_prefix_and_an_architecture_that_nobody_knows(command: Command, tmp_path: Path) -> None:
    """Where nothing fits the status is 1, and the lines are for a factory; what was asked for is in them."""
    parts = nn.ModuleDict({"encoder": nn.Linear(2, 3), "decoder": nn.Linear(3, 2)})
    torch.save({"run": parts.state_dict()}, tmp_path / "own.pth")
    refused = command("inspect", tmp_path / "own.pth")
    assert (refused.status, "type prefix: 'run.'" in refused.notes) == (2, True)
    done = command("inspect", tmp_path / "own.pth", "--prefix", "run.encoder.")
    assert done.status == 1
    assert "2 tensors, 9 values (2 of float32)" in done.out
    assert "python:PATH.py:FACTORY" in done.out
    assert "prefix: run.encoder." in done.out
    assert "decoder.weight" in done.out


class Trap(nn.Linear):
    """Touches a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return torch.save, ({}, self.marker)

    marker = ""


def test_no_code_is_run(command: Command, tmp_path: Path) -> None:
    """A pickled module is named and refused with the lines that convert it."""
    trap = Trap(2, 3)
    trap.marker = str(tmp_path / "ran")
    torch.save(trap, tmp_path / "x.pth")
    done = command("inspect", tmp_path / "x.pth")
    assert done.status == 2
    assert "torch.serialization.save" in done.notes
    assert "weights_only=False" in done.notes
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "x.pth", weights_only=False)
    assert (tmp_path / "ran").exists()
