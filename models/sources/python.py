"""Modules from a factory that the operator names: ``python:package.module:factory`` or ``python:PATH.py:factory``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from layertap.models.errors import IN_THE_LOG, LoadError, escape, find_nearest, label_failures, suggest
from layertap.models.grammar import LIBRARIES, get_base_name, is_file, parse_factory, parse_weights
from layertap.models.sources.build import (
    BuiltModel,
    construct_module,
    describe_arguments,
    list_parameters,
    read_weights,
    refuse_named_weights,
    refuse_unknown_arguments,
)
from layertap.models.sources.checkpoints import wrap_errors
from layertap.models.spec import ModelSpec

OWN_CODE = f": its own code raised this; {IN_THE_LOG}"
_FOLDERS: list[str] = []  # that are searched for factories
_PACKAGES: set[str] = set()  # that were found there
_FILE_FOLDERS: set[str] = set()  # of factories that are files


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
    name = spec.shown_source.partition(":")[2]
    shown = f"the factory {escape(name)}"
    factory = partial(_call_factory, ident, spec.args, shown)
    module, report = construct_module(spec, shown, factory, read_weights(spec))
    return BuiltModel(
        module=module,
        inputs=spec.inputs,
        architecture=f"python:{name}",
        weights="as built" if weights.is_named else weights.label,
        media="own code tells no preprocessing: its entry has no preprocess",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        settings=describe_arguments(spec.args),
        report=report,
        code="" if name.startswith("layertap.") else _import(parse_factory(ident)[0]).__name__,
    )


def add_search_folders(folders: Iterable[Path | str]) -> None:
    """Search for factories in these folders too, in their order, for the rest of this process."""
    _FOLDERS[:] = dict.fromkeys((*map(str, folders), *_FOLDERS))


def list_search_folders() -> list[str]:
    """The folders that are searched for factories."""
    return list(_FOLDERS)


def _call_factory(ident: str, args: Mapping[str, Any], shown: str) -> nn.Module:
    name, factory = parse_factory(ident)
    with label_failures("code"), wrap_errors(f"{shown} could not be built", note=OWN_CODE):
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
        shown = get_base_name(name).removesuffix(".py")
        hint = suggest(tuple(f"python:{shown}:{match}" for match in matches))
        raise LoadError(f"Python module {escape(shown)} has no factory {escape(factory)}", hint=hint)
    return attribute  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    return _import_file(Path(name)) if is_file(name) else _import_module(name)


def _import_module(name: str) -> ModuleType:
    """Import a module; its package may be in the search folders, which come before installed ones.

    Nothing else is looked for there first: other files may have the names of modules that torch imports. What the
    package imports is found at the end of ``sys.path``, where it hides nothing.
    """
    package = name.partition(".")[0]
    sys.path.extend(folder for folder in _FOLDERS if folder not in sys.path)
    try:
        is_free = package not in sys.modules and package not in sys.stdlib_module_names and package not in LIBRARIES
        if is_free and (spec := _find_package(package)) is not None:
            _PACKAGES.add(package)
            _execute(spec)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing_module_error(name, error.name or name) from error


def _find_package(name: str) -> ModuleSpec | None:
    """The package of that name in the search folders."""
    for folder in _FOLDERS:
        sys.path_importer_cache.pop(folder, None)  # it may have new files
    found = PathFinder.find_spec(name, _FOLDERS)
    # A folder that is no package may be the checkout of an installed one: leave it to Python's own finders.
    return found if found is not None and found.origin is not None else None


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module with a unique name; the file's folder is added to the end of ``sys.path``."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not path.is_file():
        detail = f"there is no file {escape(path.name)} for source python:"
        raise LoadError(detail, hint="a relative path is beside the configuration")
    _FILE_FOLDERS.add(str(path.parent))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = _execute(spec)
    except ModuleNotFoundError as error:
        raise _missing_module_error(path.name, error.name or path.name) from error
    if other := next(filter(partial(_comes_from_another, module), path.parent.glob("*.py")), None):
        del sys.modules[name]
        detail = f"{escape(path.name)} imports {escape(other.name)}, and another model's file of that name came first"
        raise LoadError(detail, hint="give one of them another name, or load each model in a process of its own")
    return module


def _comes_from_another(module: ModuleType, file: Path) -> bool:
    """Whether a module has imported other code than a file beside it, whose name was another file's already."""
    imported = sys.modules.get(file.stem)
    origin = getattr(imported, "__file__", None)
    if (
        origin is None
        or str(Path(origin).parent) not in _FILE_FOLDERS
        or Path(origin).read_bytes() == file.read_bytes()
    ):
        return False
    return any(value is imported or getattr(value, "__module__", None) == file.stem for value in vars(module).values())


def _execute(spec: ModuleSpec) -> ModuleType:
    # Dataclasses look up their module in sys.modules, also while it is being imported.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _missing_module_error(name: str, missing: str) -> LoadError:
    """The error for a missing module, or one that imports a missing one; a note lists the searched folders."""
    detail = f"there is no Python module {escape(missing)}"
    if name != missing and not name.startswith(f"{missing}."):
        detail = f"{detail}, which {escape(name)} imports"
    package = name.partition(".")[0]
    if package not in _PACKAGES and _find_package(package) is not None:
        where = f"a package {escape(package)} that is installed comes before yours"
        return LoadError(f"{detail}: {where}", hint="give yours another name")
    error = LoadError(detail, hint="install it, or put it beside the configuration or into the working directory")
    error.add_note(f"looked in {', '.join(dict.fromkeys((*_FOLDERS, *sys.path)))}")
    return error
