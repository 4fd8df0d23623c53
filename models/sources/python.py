"""Modules from a factory that the operator names: ``python:package.module:factory`` or ``python:PATH.py:factory``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from layertap.models.errors import IN_THE_LOG, LoadError, escape, find_nearest, label_failures, suggest
from layertap.models.grammar import SOURCES, is_file, parse_factory, parse_weights
from layertap.models.sources.build import (
    BuiltModel,
    construct_module,
    describe_arguments,
    list_parameters,
    read_weights,
    refuse_named_weights,
    refuse_unknown_arguments,
    wrap_build_errors,
)
from layertap.models.spec import ModelSpec

MAX_TRIES = 9
PACKAGE_PREFIX = "layertap."  # digests of our own models are older than this package prefix


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The model that ``factory(**args)`` returns; DEFAULT keeps its weights, and ``inputs`` must be configured.

    The module's optional attribute ``num_prefix_tokens`` is the number of tokens before the patches.
    LoadError if the module, the factory, its result, the inputs or the weights are invalid.
    """
    if not spec.inputs:
        hint = "add inputs: name, shape and dtype of each"
        raise LoadError("source python: can't tell what the model takes", hint=hint)
    weights = parse_weights(spec.weights)
    refuse_named_weights(weights, "a python: factory")
    name = SOURCES["python"].show(ident)
    shown = f"the factory {escape(name)}"
    factory = partial(_call_factory, ident, spec.args, shown)
    module, report = construct_module(spec, shown, factory, read_weights(spec))
    return BuiltModel(
        module=module,
        inputs=spec.inputs,
        architecture=f"python:{name.removeprefix(PACKAGE_PREFIX)}",
        weights="as built" if weights.is_named else weights.label,
        pictures="own code tells no preprocessing: its entry has no preprocess",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        settings=describe_arguments(spec.args),
        report=report,
        code="" if name.startswith(PACKAGE_PREFIX) else _import(parse_factory(ident)[0]).__name__,
    )


def add_search_folders(folders: Iterable[Path | str]) -> None:
    """Search for factories in these folders too, in their order, for the rest of this process."""
    _FINDER.folders = list(dict.fromkeys((*map(str, folders), *_FINDER.folders)))


def list_search_folders() -> list[str]:
    """The folders that are searched for factories."""
    return list(_FINDER.folders)


class _Finder:
    """Finds factories' packages in the search folders, before installed ones.

    It finds only packages that a configuration names, because other files there may have the names of modules that
    torch and others import. What these packages import is found at the end of ``sys.path``, where it hides nothing.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []
        self._names: set[str] = set()

    def add(self, package: str) -> None:
        """Let a package be found, unless its name is already taken by an imported module, the stdlib or a source."""
        if package not in sys.modules and package not in sys.stdlib_module_names and package not in SOURCES:
            self._names.add(package)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        sys.path.extend(folder for folder in self.folders if folder not in sys.path)
        for _ in range(MAX_TRIES):
            with suppress(RuntimeError):  # another thread imports meanwhile, and adds to what is gone through
                importlib.invalidate_caches()
                break

    def hides(self, package: str) -> bool:
        """Whether the search folders have a package of that name, but another one is imported."""
        return package not in self._names and PathFinder.find_spec(package, self.folders) is not None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Called by Python's import system."""
        found = PathFinder.find_spec(name, self.folders) if name in self._names else None
        # A folder that is no package may be the checkout of an installed one: leave it to Python's own finders.
        return found if found is not None and found.origin is not None else None


_FINDER = _Finder()


def _call_factory(ident: str, args: Mapping[str, Any], shown: str) -> nn.Module:
    name, factory = parse_factory(ident)
    with label_failures("code"), wrap_build_errors(shown, f": its own code raised this; {IN_THE_LOG}"):
        called = _import_factory(name, factory)
        _check_arguments(called, args, shown)
        module = called(**args)
    if not isinstance(module, nn.Module):
        raise LoadError(f"{shown} returned {escape(type(module).__name__)}, not a torch.nn.Module")
    return module


def _check_arguments(factory: Callable[..., Any], args: Mapping[str, Any], shown: str) -> None:
    """LoadError if a factory can't be called with these arguments."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        refuse_unknown_arguments(args, list_parameters(factory), shown)
        needed = [name for name, each in signature.parameters.items() if each.default is each.empty]
        hint = f"type args: {{{', '.join(f'{name}: …' for name in needed if name not in args)}}}"
        raise LoadError(f"{shown} needs arguments", hint=hint) from error


def _import_factory(name: str, factory: str) -> Callable[..., Any]:
    loaded = _import(name)
    # The name is the operator's own configuration; nothing from a request comes here.
    attribute = getattr(loaded, factory, None)
    if not callable(attribute):
        matches = find_nearest(factory, vars(loaded), 3)
        shown = SOURCES["python"].show(f"{name}:{factory}").rpartition(":")[0]
        hint = suggest(tuple(f"python:{shown}:{match}" for match in matches))
        raise LoadError(f"Python module {escape(shown)} has no factory {escape(factory)}", hint=hint)
    return attribute  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    return _import_file(Path(name)) if is_file(name) else _import_module(name)


def _import_module(name: str) -> ModuleType:
    if name not in sys.modules:
        _FINDER.add(name.partition(".")[0])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing_module_error(name, error.name or name) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module with a unique name; the file's folder is added to the end of ``sys.path``."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        detail = f"there is no file {escape(path.name)} for source python:"
        raise LoadError(detail, hint="a relative path is beside the configuration")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Dataclasses look up their module in sys.modules, also while it is being imported.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise _missing_module_error(path.name, error.name or path.name) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _missing_module_error(name: str, missing: str) -> LoadError:
    """The error for a missing module, or one that imports a missing one; a note lists the searched folders."""
    detail = f"there is no Python module {escape(missing)}"
    if name != missing and not name.startswith(f"{missing}."):
        detail = f"{detail}, which {escape(name)} imports"
    package = name.partition(".")[0]
    if _FINDER.hides(package):
        where = f"a package {escape(package)} that is installed comes before yours"
        return LoadError(f"{detail}: {where}", hint="give yours another name")
    error = LoadError(detail, hint="install it, or put it beside the configuration or into the working directory")
    error.add_note(f"looked in {', '.join(dict.fromkeys((*_FINDER.folders, *sys.path)))}")
    return error
