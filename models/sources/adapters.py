"""Adapters as PEFT saves them, merged into the weights of the base model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape, format_names, label_failures
from layertap.models.grammar import ADAPTER_CONFIG, not_installed_error
from layertap.models.sources.checkpoints import read_checkpoint, wrap_errors

FILES = ("adapter_model.safetensors", "adapter_model.bin")
KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # the PEFT types that can be merged into weights
NAME = "default"  # PEFT's name for an unnamed adapter
PREFIX = "base_model.model."
BASE_HINT = (
    "source, args and weights are those of the model that it was trained beside: its adapter_config.json names it"
)
UNMERGED_HINT = (
    "type adapter: FOLDER of the adapter_config.json that the training saved, or write one with its "
    "peft_type, r, lora_alpha and target_modules; or save what PEFT's merge_and_unload() returns"
)


def list_adapter_names(names: Iterable[str]) -> list[str]:
    """The tensor names that belong to an adapter, or to a layer with an adapter."""
    return [name for name in names if any(part == "base_layer" or part[:5] == "lora_" for part in name.split("."))]


def make_unmerged_error(names: Iterable[str], label: str) -> LoadError:
    """The error for a checkpoint with an adapter's tensors, which do not include its scaling factor."""
    shown = format_names([escape(name) for name in sorted(names)])
    detail = f"{escape(label)} has a LoRA adapter that is not merged ({shown}), and not its lora_alpha"
    return LoadError(detail, hint=UNMERGED_HINT)


@label_failures("weights")
def merge_adapter(module: nn.Module, folder: Path) -> None:
    """Merge a folder's adapter into a module's weights with PEFT; LoadError if it can't be merged or does not fit."""
    shown = escape(folder.name)
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise LoadError(f"adapter {shown} holds no {FILES[0]}", hint=f"it takes one of {', '.join(FILES)}")
    state = read_checkpoint(file)
    with insert_adapter(module, folder) as peft:
        tensors = {name.removeprefix(PREFIX): value for name, value in state.items()}
        found = peft.set_peft_model_state_dict(module, tensors)
        missing = [name for name in found.missing_keys if NAME in name.split(".")]
        names = [escape(name) for name in (*missing, *found.unexpected_keys)]
        if names:
            raise LoadError(f"adapter {shown} does not fit the model: {format_names(names)}", hint=BASE_HINT)


@contextmanager
def insert_adapter(module: nn.Module, folder: Path) -> Iterator[Any]:
    """Insert a folder's adapter into a module with PEFT, yield the peft library, and merge at the end; LoadError.

    Only adapter_config.json is read from the folder. Inside, the module has the tensor names it had in training.
    """
    shown = f"adapter {escape(folder.name)}"
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise not_installed_error("peft") from error
    # Some adapters are initialised from random parts of the weights.
    with wrap_errors(f"{shown} could not be merged into the model", BASE_HINT), construct_alone(0):
        kind = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))["peft_type"]
        if kind not in KINDS:
            hint = f"types that are merged here: {', '.join(KINDS)}"
            raise LoadError(f"{shown} is of the type {escape(str(kind))}, which is not merged into weights", hint=hint)
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        tuner = peft.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](module, {NAME: config}, NAME)
        yield peft
        tuner.merge_and_unload()
