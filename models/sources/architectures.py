"""Architectures of torchvision and timm that a checkpoint fits, by names and shapes, without loading values."""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from layertap.models.errors import LoadError, escape
from layertap.models.sources import torchvision
from layertap.models.sources.checkpoints import StateDict, fit_names

MAX_DIFFERENT = 6  # parameters whose shapes may differ: heads, the first convolution, positions
Shapes = Mapping[str, tuple[int, ...]]
Build = Callable[[Mapping[str, Any]], nn.Module]  # takes a constructor's arguments


@dataclass(frozen=True)
class Fit:
    """A source that, with these arguments, has the names and shapes of a checkpoint's tensors.

    ``prefix`` is removed from names. ``has_weights``: the source is the checkpoint's own folder, and needs no
    ``weights``.
    """

    source: str
    args: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    has_weights: bool = False

    def describe(self) -> dict[str, Any]:
        """The fields of a configuration."""
        return {"source": self.source} | ({"args": dict(self.args)} if self.args else {})

    def __str__(self) -> str:
        return f"{self.source} with {json.dumps(self.args)}" if self.args else self.source


def find_fits(path: Path, state: StateDict) -> list[Fit]:
    """What a folder's config.json says, else all architectures that fit; those named in the file's name come first.

    LoadError if none fits because the checkpoint has the model's tensors under several prefixes.
    """
    if (path / "config.json").is_file():
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
        except ValueError as error:
            raise LoadError(f"config.json of {escape(path.name)} can't be read") from error
        source = f"timm:{path}/" if "architecture" in config else f"transformers:{path}"
        return [Fit(source, has_weights=True)]
    fits, refusal = list[Fit](), None
    for source, build in _list_architectures(state):
        try:
            fit = find_fit(source, build, state)
        except LoadError as error:
            refusal = error
        else:
            fits += [fit] if fit is not None else []
    if not fits and refusal is not None:
        raise refusal
    return sorted(fits, key=lambda fit: _rank(fit, path))


def _rank(fit: Fit, path: Path) -> int:
    """Sort key: architectures that the file's name contains, or that begin with it, come first."""
    name, stem = fit.source.partition(":")[2], path.name.partition(".")[0]
    return -min(len(name), len(stem)) if name in stem or name.startswith(stem) else 0


def _list_architectures(state: StateDict) -> Iterator[tuple[str, Build]]:
    """Every architecture that may fit, by source; timm's only if timm is installed."""
    for name in torchvision.list_offered():
        yield f"torchvision:{name}", partial(torchvision.construct, name, state)
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        return
    for name in timm.list_models():
        yield f"timm:{name}", partial(_construct_timm, timm, name)


def _construct_timm(timm: Any, name: str, args: Mapping[str, Any]) -> nn.Module:
    return timm.create_model(name, pretrained=False, **args)  # type: ignore[no-any-return]


def find_fit(source: str, build: Build, state: StateDict) -> Fit | None:
    """The architecture with arguments that make it fit; None if none do."""
    module = _build(build, {}, state)
    if module is None:
        return None
    fitted, wanted = fit_names(state, module.state_dict()), _list_shapes(module.state_dict())
    given = _list_shapes(fitted)
    if given == wanted:
        return Fit(source, prefix=fitted.prefix)
    args = _guess_arguments(wanted, given)
    changed = _build(build, args, state) if args else None
    if changed is None or _list_shapes(changed.state_dict()) != _list_shapes(fit_names(state, changed.state_dict())):
        return None
    return Fit(source, args, fitted.prefix)


def _build(build: Build, args: Mapping[str, Any], state: StateDict) -> nn.Module | None:
    """Construct a module without values; None if its shapes differ too much, or its constructor raises."""
    with warnings.catch_warnings(action="ignore"), _stop_at_difference(state):
        try:
            try:
                with torch.device("meta"):
                    return build(args)
            except NotImplementedError:  # its constructor reads values, which the meta device lacks
                return build(args)
        except Exception:  # raised by the constructor, or by the check: it does not fit
            return None


@contextmanager
def _stop_at_difference(state: StateDict) -> Iterator[None]:
    """Stop a module's construction once too many parameters have shapes that the checkpoint does not have."""
    shapes = {tuple(value.shape) for value in state.values()}
    different = 0

    def check(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        nonlocal different
        different += value is not None and tuple(value.shape) not in shapes
        if different > MAX_DIFFERENT:
            raise ValueError("this is another module than is looked for")

    handle = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _list_shapes(tensors: Mapping[str, Any]) -> Shapes:
    """Shapes of the tensors; a module's extra state is left out."""
    return {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)}


def _guess_arguments(wanted: Shapes, given: Shapes) -> dict[str, Any]:
    """Constructor arguments that may explain the differences: classes, channels, image size; empty if none do."""
    if wanted.keys() > given.keys():
        return {"num_classes": 0}
    if wanted.keys() != given.keys():
        return {}
    args: dict[str, Any] = {}
    for name, shape in given.items():
        for argument, guess in GUESSES.items():
            if shape != wanted[name] and (value := guess(wanted[name], shape, given)) is not None:
                args[argument] = value
                break
    return args


def _guess_classes(wanted: tuple[int, ...], given: tuple[int, ...], shapes: Shapes) -> int | None:
    return given[0] if given and wanted[1:] == given[1:] else None


def _guess_channels(wanted: tuple[int, ...], given: tuple[int, ...], shapes: Shapes) -> int | None:
    return given[1] if len(given) == 4 and wanted[:1] + wanted[2:] == given[:1] + given[2:] else None


def _guess_side(wanted: tuple[int, ...], given: tuple[int, ...], shapes: Shapes) -> int | None:
    """The side of square pictures, from the positions of the patches and of a few tokens before them."""
    patches = shapes.get(PATCHES)
    if patches is None or len(given) != 3 or (wanted[0], wanted[2]) != (given[0], given[2]):
        return None
    tokens = given[1] - (wanted[1] - math.isqrt(wanted[1]) ** 2)
    return math.isqrt(tokens) * patches[-1] if tokens > 0 and math.isqrt(tokens) ** 2 == tokens else None


PATCHES = "patch_embed.proj.weight"
GUESSES: dict[str, Callable[[tuple[int, ...], tuple[int, ...], Shapes], int | None]] = {
    "num_classes": _guess_classes,
    "in_chans": _guess_channels,
    "img_size": _guess_side,
}
