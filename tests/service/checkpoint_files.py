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
from huggingface_hub import save_torch_model
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models import get_model

from tests import transformers_nets
from tests.oracle import seeded

HERE = "HERE/"  # the folder of the checkpoint
State = Mapping[str, Tensor]
SQUEEZENET = {"source": "torchvision:squeezenet1_1", "args": {"num_classes": 5}}
TIMM = {"source": "timm:test_resnet", "args": {"num_classes": 5}}
OWN = {"source": "python:tests.nets:Chain", "inputs": [{"name": "image", "shape": [3, 32, 32]}]}


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


def timm_trainer(module: nn.Module, ema: nn.Module) -> dict[str, Any]:
    """A checkpoint as timm's train.py writes it."""
    return {
        "epoch": 3,
        "arch": "test_resnet",
        "state_dict": module.state_dict(),
        "optimizer": train(module),
        "version": 2,
        "args": argparse.Namespace(model="test_resnet", lr=0.1),
        "state_dict_ema": ema.state_dict(),
        "metric": 71.5,
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


def _saved_model(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    save_model(nn.ModuleDict({"module": module}), str(folder / "parallel.safetensors"))
    return {"weights": f"{HERE}parallel.safetensors"}


def _own_prefix(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    state = before("student.", module.state_dict()) | before("teacher.", squeezenet(9).state_dict())
    torch.save({"model": state}, folder / "teacher.pth")
    return {"weights": f"{HERE}teacher.pth", "prefix": "student."}


def _own_keys(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    run = {"generation": {"best": before("core.", module.state_dict()), "last": squeezenet(9).state_dict()}}
    torch.save(run, folder / "run.pth")
    return {"weights": f"{HERE}run.pth", "prefix": "generation.best.core."}


def _half(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    module.half().float()
    torch.save(copy.deepcopy(module).half().state_dict(), folder / "half.pth")
    return {"weights": f"{HERE}half.pth"}


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


def _left_over(module: nn.Module) -> object:
    return {**module.state_dict(), "projector.weight": torch.ones(3)}


def _not_strict(write: Write) -> Write:
    return lambda folder, module: {**write(folder, module), "strict": False}


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, str]]] = {
    "torchvision": (squeezenet, SQUEEZENET, ("features.12", ".")),
    "timm": (small_resnet, TIMM, ("layer4", ".")),
    "timm folder": (small_resnet, {}, ("layer4", ".")),
    "transformers": (vit, {"source": ""}, ("vit.layernorm", "classifier")),
}
KINDS: dict[str, tuple[str, Write]] = {
    "plain.safetensors": ("torchvision", _plain_safetensors),
    "plain.pth": ("torchvision", _saved("plain.pth", nn.Module.state_dict)),
    "plain.pt of torch 1.5": (
        "timm",
        _saved("old.pt", nn.Module.state_dict, _use_new_zipfile_serialization=False),
    ),
    "pytorch_model.bin": ("timm", _saved("pytorch_model.bin", nn.Module.state_dict)),
    "half precision": ("timm", _half),
    "state_dict, .pth.tar": (
        "timm",
        _saved("best.pth.tar", lambda module: {"state_dict": nn.DataParallel(module).state_dict(), "epoch": 1}),
    ),
    "model": (
        "torchvision",
        _saved("model.pth", lambda module: {"model": module.state_dict(), "optimizer": train(module)}),
    ),
    "model_state_dict": (
        "timm",
        _saved(
            "tutorial.pt",
            lambda module: {
                "model_state_dict": module.state_dict(),
                "optimizer_state_dict": train(module),
                "loss": 1.0,
            },
        ),
    ),
    "net": ("timm", _saved("net.pth", lambda module: {"net": module.state_dict(), "acc": 93.1})),
    "ema beside model": (
        "torchvision",
        _saved("ema.pth", lambda module: {"ema": module.state_dict(), "model": squeezenet(9).state_dict()}),
    ),
    "ema with updates": (
        "timm",
        _saved("nested.pth", lambda module: {"ema": {"module": module.state_dict(), "updates": 7}, "last_epoch": 2}),
    ),
    "ema_state_dict": (
        "timm",
        _saved(
            "e.pt", lambda module: {"state_dict": small_resnet(9).state_dict(), "ema_state_dict": module.state_dict()}
        ),
    ),
    "torchvision's references": ("torchvision", _saved("checkpoint.pth", _averaged)),
    "timm's train.py": ("timm", _saved("model_best.pth.tar", lambda module: timm_trainer(small_resnet(9), module))),
    "torch.compile": ("timm", _saved("c.pth", lambda module: before("_orig_mod.", module.state_dict()))),
    "torch.compile in DataParallel": (
        "timm",
        _saved("d.pth", lambda module: {"model": before("module._orig_mod.", module.state_dict())}),
    ),
    "safetensors of DataParallel": ("torchvision", _saved_model),
    "Lightning, model.": (
        "torchvision",
        _saved("last.ckpt", lambda module: lightning(Training(model=module, criterion=Criterion()).state_dict())),
    ),
    "Lightning, net. compiled": (
        "timm",
        _saved("epoch=3.ckpt", lambda module: lightning(before("net._orig_mod.", module.state_dict()))),
    ),
    "MMPretrain": ("timm", _saved("epoch_3.pth", lambda module: mmengine(parted(module.state_dict(), "fc.")))),
    "MMPretrain with EMA": (
        "timm",
        _saved(
            "epoch_4.pth",
            lambda module: mmengine(
                parted(module.state_dict(), "fc."),
                ema_state_dict={"steps": torch.tensor(3), **before("module.", small_resnet(9).state_dict())},
            ),
        ),
    ),
    "prefix of one's own": ("torchvision", _own_prefix),
    "keys of one's own": ("torchvision", _own_keys),
    "without a head, not strict": ("torchvision", _lost_head),
    "with more, not strict": ("torchvision", _not_strict(_saved("more.pth", _left_over))),
}


def _sharded(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    """As accelerate's save_model and huggingface_hub lay out a large model."""
    save_torch_model(module, folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return {"weights": f"{HERE}model.safetensors.index.json"}


def _sharded_pickles(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    """As accelerate and transformers wrote large models before safetensors."""
    save_torch_model(module, folder, max_shard_size="200KB", safe_serialization=False)
    return {"weights": HERE}


def _accelerate(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    """A folder as accelerate's save_state writes it."""
    save_file(module.state_dict(), folder / "model.safetensors", {"format": "pt"})
    torch.save(train(module), folder / "optimizer.bin")
    torch.save({"step": 3}, folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(b"code")
    return {"weights": HERE}


def _timm_folder(*, safe: bool) -> Write:
    def write(folder: Path, module: nn.Module) -> Mapping[str, Any]:
        timm.models.save_for_hf(module, str(folder), safe_serialization=safe)
        return {"source": f"timm:{HERE}"}

    return write


def _transformers_folder(**options: Any) -> Write:
    def write(folder: Path, module: Any) -> Mapping[str, Any]:
        module.save_pretrained(folder, **options)
        return {"source": f"transformers:{HERE}"}

    return write


def _transformers_pickle(folder: Path, module: Any) -> Mapping[str, Any]:
    """A folder of the time before safetensors."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    torch.save(module.state_dict(), folder / "pytorch_model.bin")
    return {"source": f"transformers:{HERE}"}


def _transformers_lightning(folder: Path, module: Any) -> Mapping[str, Any]:
    """A checkpoint of a LightningModule around a model whose config.json lies beside it."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    torch.save(lightning(before("model.", module.state_dict())), folder / "last.ckpt")
    return {"source": f"transformers:{HERE}", "weights": f"{HERE}last.ckpt"}


FOLDERS: dict[str, tuple[str, Write]] = {
    "sharded safetensors": ("timm", _sharded),
    "sharded pytorch_model.bin": ("timm", _sharded_pickles),
    "accelerate's save_state": ("torchvision", _accelerate),
    "timm's save_for_hf": ("timm folder", _timm_folder(safe=True)),
    "timm's save_for_hf as a pickle": ("timm folder", _timm_folder(safe=False)),
    "save_pretrained": ("transformers", _transformers_folder()),
    "save_pretrained in shards": ("transformers", _transformers_folder(max_shard_size="20KB")),
    "transformers' pytorch_model.bin": ("transformers", _transformers_pickle),
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


def _adapter_of_folder(folder: Path, module: Any) -> Mapping[str, Any]:
    module.save_pretrained(folder)
    _adapt(folder, module, "q_proj", "query", "classifier")
    return {"source": f"transformers:{HERE}", "adapter": f"{HERE}adapter"}


def _training_with_adapter(folder: Path, module: nn.Module) -> Mapping[str, Any]:
    """All that is trained and all that is not in one file; the adapter's own file is not looked at."""
    state = _adapt(folder, module, "squeeze").state_dict()
    torch.save(lightning(before("model.", state)), folder / "last.ckpt")
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    return {"weights": f"{HERE}last.ckpt", "adapter": f"{HERE}adapter"}


ADAPTERS: dict[str, tuple[str, Write]] = {
    "LoRA of PEFT": ("timm", _adapter),
    "LoRA of PEFT beside a folder": ("transformers", _adapter_of_folder),
    "LoRA in a training": ("torchvision", _training_with_adapter),
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
