"""Checkpoints as training scripts and libraries leave them, each with the configuration that serves it."""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models import get_model

from tests import transformers_nets
from tests.oracle import seeded

HERE = "HERE/"  # the folder of the checkpoint
State = Mapping[str, Tensor]
SQUEEZENET = {"source": "torchvision:squeezenet1_1", "args": {"num_classes": 5}}
TIMM = {"source": "timm:test_resnet", "args": {"num_classes": 5}}


@dataclass(frozen=True)
class Written:
    """The fields that serve a checkpoint, the model that it was made from, and layers to compare."""

    fields: dict[str, Any]
    module: nn.Module
    layers: tuple[str, str]


def squeezenet(seed: int = 0) -> nn.Module:
    """A small architecture of torchvision with five classes."""
    return seeded(get_model("squeezenet1_1", num_classes=5), seed).eval()


def small_resnet(seed: int = 0) -> nn.Module:
    """A small architecture of timm with five classes."""
    return seeded(timm.create_model("test_resnet", num_classes=5), seed).eval()


class Criterion(nn.Module):
    """A loss that has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))


class Training(nn.Module):
    """What a LightningModule is: a model as one part, and other parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class AttributeDict(dict[str, Any]):
    """As Lightning keeps hyperparameters: a class that no reader of tensors knows."""


def train(module: nn.Module) -> dict[str, Any]:
    """An optimizer's state after a step: two tensors for each parameter."""
    trained = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(trained.parameters())
    for value in trained.parameters():
        value.grad = torch.ones_like(value)
    optimizer.step()
    return optimizer.state_dict()


def before(prefix: str, state: State) -> dict[str, Tensor]:
    """Tensors with a prefix before their names."""
    return {prefix + name: value for name, value in state.items()}


def lightning(state: State, **more: Any) -> dict[str, Any]:
    """A checkpoint as Lightning's Trainer writes it."""
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": OrderedDict(state),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": AttributeDict(lr=0.1),
        **more,
    }


def mmengine(state: State, **more: Any) -> dict[str, Any]:
    """A checkpoint as MMPretrain's runner writes it."""
    return {
        "meta": {"epoch": 3, "mmengine_version": "0.10.4", "dataset_meta": {"classes": ("a", "b")}, "time": "now"},
        "state_dict": OrderedDict(state),
        "message_hub": {"log_scalars": {"loss": np.arange(3.0)}, "resumed_keys": OrderedDict()},
        "optimizer": {"state": {}, "param_groups": []},
        **more,
    }


def parted(state: State, head: str) -> dict[str, Tensor]:
    """A classifier as MMPretrain names it: a backbone, and a head with its own layer."""
    return {f"head.{name}" if name.startswith(head) else f"backbone.{name}": value for name, value in state.items()}


def vit(seed: int = 0) -> nn.Module:
    """A small architecture of transformers with three classes."""
    module: nn.Module = transformers_nets.net("vit", seed)
    return module


Write = Callable[[Path, nn.Module], Mapping[str, Any]]  # what is served beside a source


def _saved(name: str, make: Callable[[nn.Module], object], **options: Any) -> Write:
    """Write by torch.save what is made of a module."""

    def write(folder: Path, module: nn.Module) -> Mapping[str, Any]:
        torch.save(make(module), folder / name, **options)
        return {"weights": f"{HERE}{name}"}

    return write


def _plain_safetensors(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    save_file(module.state_dict(), folder / "plain.safetensors")
    return {"weights": f"{HERE}plain.safetensors"}


def _averaged(module: nn.Module) -> object:
    averaged = AveragedModel(nn.DataParallel(module))
    return {"model": squeezenet(9).state_dict(), "model_ema": averaged.state_dict(), "args": argparse.Namespace(lr=1)}


def _lost_head(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    """A backbone without its head: the head is then as the seed 0 draws it."""
    torch.save(
        {name: value for name, value in module.state_dict().items() if "classifier." not in name}, folder / "b.pth"
    )
    torch.manual_seed(0)
    drawn = get_model("squeezenet1_1", num_classes=5)
    module.classifier.load_state_dict(drawn.classifier.state_dict())  # type: ignore[union-attr, operator]
    return {"weights": f"{HERE}b.pth", "strict": False}


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, str]]] = {
    "torchvision": (squeezenet, SQUEEZENET, ("features.12", ".")),
    "timm": (small_resnet, TIMM, ("layer4", ".")),
    "timm folder": (small_resnet, {}, ("layer4", ".")),
    "transformers": (vit, {"source": ""}, ("vit.layernorm", "classifier")),
}
KINDS: dict[str, tuple[str, Write]] = {
    "plain.safetensors": ("torchvision", _plain_safetensors),
    "torchvision's references": ("torchvision", _saved("checkpoint.pth", _averaged)),
    "Lightning, model.": (
        "torchvision",
        _saved("last.ckpt", lambda module: lightning(Training(model=module, criterion=Criterion()).state_dict())),
    ),
    "MMPretrain": ("timm", _saved("epoch_3.pth", lambda module: mmengine(parted(module.state_dict(), "fc.")))),
    "without a head, not strict": ("torchvision", _lost_head),
}


def _timm_folder(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    timm.models.save_for_hf(module, str(folder), safe_serialization=True)
    return {"source": f"timm:{HERE}"}


def _transformers_lightning(folder: Path, module: Any) -> Mapping[str, Any]:
    """A checkpoint of a LightningModule around a model whose config.json lies beside it."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    torch.save(lightning(before("model.", module.state_dict())), folder / "last.ckpt")
    return {"source": f"transformers:{HERE}", "weights": f"{HERE}last.ckpt"}


FOLDERS: dict[str, tuple[str, Write]] = {
    "timm's save_for_hf": ("timm folder", _timm_folder),
    "Lightning around transformers": ("transformers", _transformers_lightning),
}


def _adapt(folder: Path, module: nn.Module, *targets: str) -> Any:
    """The model that was trained beside a base, which is saved: merged, it is what is served."""
    torch.save(module.state_dict(), folder / "base.pth")
    adapted = peft.PeftModel(copy.deepcopy(module), peft.LoraConfig(r=2, lora_alpha=3, target_modules=list(targets)))
    for name, value in adapted.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(str(folder / "adapter"))
    module.load_state_dict(copy.deepcopy(adapted).merge_and_unload().state_dict())
    return adapted


def _adapter(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    _adapt(folder, module, "fc", "conv2")
    return {"weights": f"{HERE}base.pth", "adapter": f"{HERE}adapter"}


ADAPTERS: dict[str, tuple[str, Write]] = {
    "LoRA of PEFT": ("timm", _adapter),
}
KINDS |= FOLDERS | ADAPTERS


def write(kind: str, folder: Path) -> Written:
    """One kind of checkpoint in a folder of its own."""
    net, make = KINDS[kind]
    build, fields, layers = NETS[net]
    module = build()
    folder.mkdir(parents=True)
    entry = {**fields, **make(folder, module)}
    moved = {
        each: value.replace(HERE, f"{folder.name}/") if isinstance(value, str) else value
        for each, value in entry.items()
    }
    return Written(moved, module.eval(), layers)
