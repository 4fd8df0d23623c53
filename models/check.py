"""Mistakes in a model's entry that can be found before anything is loaded or torch is imported.

An entry that would load is never refused: if a mistake can't be detected from outside, none is reported.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from layertap.models.errors import AbsentError, LayertapError, LoadError
from layertap.models.grammar import (
    ADAPTER_CONFIG,
    is_importable,
    not_installed_error,
    parse_device,
    parse_devices,
    parse_factory,
    parse_source,
    parse_weights,
)
from layertap.models.labels import read_labels
from layertap.models.plan.selectors import parse_selector
from layertap.models.spec import ModelSpec

Place = tuple[str | int, ...]
DRIVER = "libcuda.so.1"


def find_mistakes(specs: Mapping[int, ModelSpec], folders: Sequence[Path]) -> Iterator[tuple[Place, LayertapError]]:
    """The mistakes in numbered entries: the path to the field, which begins with the entry's number, and the error.

    Factories are searched in ``folders`` too.
    """
    registers = any(_may_register(spec, folders) for spec in specs.values())
    for number, spec in specs.items():
        for place, check in _list_checks(spec, folders, registers):
            try:
                check()
            except OSError as error:  # a path is too long, or a folder is not accessible
                mistake: LayertapError = AbsentError(f"{error.filename} can't be read: {error.strerror}")
            except LayertapError as error:
                mistake = error
            else:
                continue
            if spec.required or not isinstance(mistake, AbsentError):
                yield (number, *place), mistake


def _list_checks(
    spec: ModelSpec, folders: Sequence[Path], registers: bool
) -> Iterator[tuple[Place, Callable[[], object]]]:
    yield ("source",), partial(_check_source, spec, folders, registers)
    yield ("weights",), partial(_check_weights, spec)
    if spec.prefix:
        yield ("prefix",), partial(_check_prefix, spec)
    if spec.adapter:
        yield ("adapter",), partial(_check_adapter, spec)
    yield ("devices" if spec.devices else "device",), partial(_check_devices, spec)
    if spec.labels is not None:
        yield ("labels",), partial(read_labels, spec.labels)
    if spec.embedding_layer is not None:
        yield ("embedding",), partial(parse_selector, spec.embedding_layer)
    for name, path in spec.projections.items():
        yield ("projections", name), partial(_check_weights, replace(spec, weights=path))
    for number, warm in enumerate(spec.warm):
        for at, text in enumerate(warm.layers):
            yield ("warm", number, "layers", at), partial(parse_selector, text)


def _check_source(spec: ModelSpec, folders: Sequence[Path], registers: bool) -> None:
    source, ident = parse_source(spec.source)
    if source.extra is not None:
        _check_installed(source.extra)
    if source.check is not None:
        source.check(ident, folders, registers)


def _check_installed(library: str) -> None:
    if find_spec(library) is None:
        raise not_installed_error(library)


def _may_register(spec: ModelSpec, folders: Sequence[Path]) -> bool:
    """Whether a factory's module may register architectures: a missing module registers none."""
    kind, _, ident = spec.source.partition(":")
    with suppress(LayertapError):
        return kind == "python" and is_importable(parse_factory(ident)[0].partition(".")[0], folders)
    return False


def _check_weights(spec: ModelSpec) -> None:
    path = parse_weights(spec.weights).path
    if path is not None and not path.exists():
        raise AbsentError(f"there is no file {path}")


def _check_prefix(spec: ModelSpec) -> None:
    if parse_weights(spec.weights).path is None:
        raise LoadError("prefix is of names in a checkpoint, and weights names none", hint="leave prefix out")


def _check_adapter(spec: ModelSpec) -> None:
    _check_installed("peft")
    if not (Path(spec.adapter) / ADAPTER_CONFIG).is_file():
        raise AbsentError(f"there is no {ADAPTER_CONFIG} in {spec.adapter}")


def _check_devices(spec: ModelSpec) -> None:
    devices = parse_devices(spec.devices) if spec.devices else (parse_device(spec.device),)
    if (not devices or devices[0][0] == "cuda") and not _may_have_gpu():
        raise AbsentError("there is no GPU on this machine", hint="use device: auto or cpu")


def _may_have_gpu() -> bool:
    """False only if torch certainly finds no GPU: it is built without support, or there is no driver."""
    torch_spec = find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return True
    built = (Path(torch_spec.origin).parent / "version.py").read_text(encoding="utf-8")
    without = {name for name in ("cuda", "hip") if re.search(rf"^{name}\b.*= None$", built, re.MULTILINE)}
    if "hip" not in without or sys.platform != "linux":
        return True
    if "cuda" in without:
        return False
    try:
        ctypes.CDLL(DRIVER)  # as torch itself looks for it
    except OSError:
        return False
    return True
