"""transformers' switches for the whole process, made a thread's own: they would reach models that load or run beside.

While the library constructs a model it sets torch's default dtype (``construction.py`` sees to that) and puts other
functions in the place of its own and torch's. Each is replaced here once, by what does the same for one thread.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from layertap.models.errors import LoadError


class _Thread(threading.local):
    """Whether this thread leaves weights untied for now, and whether it leaves those alone that are loaded."""

    untied = False
    guarded = False


_thread = _Thread()
_lock = threading.Lock()


def isolate() -> None:
    """Let the library's switches hold for the thread that sets them; LoadError where it has others than are known.

    May be called again and again, by any thread.
    """
    try:
        modeling: Any = importlib.import_module("transformers.modeling_utils")  # as MODELING
        initialization: Any = importlib.import_module("transformers.initialization")
    except ImportError as error:
        raise LoadError("this version of transformers is not known here", hint=VERSION_HINT) from error
    with _lock:
        if getattr(initialization, "no_tie_weights", None) is _no_tie_weights:
            return
        if not all(hasattr(initialization, name) for name in KNOWN):
            raise LoadError("this version of transformers is not known here", hint=VERSION_HINT)
        _guard_in_threads(initialization)
        base = modeling.PreTrainedModel
        # Its own decorators are the guard as it was, and this one.
        base.initialize_weights = torch.no_grad()(_guard_loaded_weights()(inspect.unwrap(base.initialize_weights)))
        base.tie_weights = _skip_if_untied(base.tie_weights)
        initialization.meta_device_safe_creation_ops = _LinspaceOnCPU
        initialization.no_tie_weights = _no_tie_weights


def isolate_when_imported() -> None:
    """Isolate the library once its models are imported: now, where they are already, or when somebody imports them.

    A factory may import them when it is called. A version without what could be isolated is left as it is.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if MODELING in sys.modules:
        _isolate_known()


def _isolate_known() -> None:
    with suppress(LoadError):
        isolate()


class _Finder:
    """Finds the file of the library in which its switches are used, and has it isolated when it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """What Python's import asks."""
        found = PathFinder.find_spec(name, path) if name == MODELING else None
        loader: Any = found.loader if found is not None else None
        if loader is None:
            return None
        run = loader.exec_module

        def run_isolated(module: ModuleType) -> None:
            run(module)
            _isolate_known()

        loader.exec_module = run_isolated  # of this loader only, which is for this file only
        return found


_FINDER = _Finder()


@contextmanager
def _no_tie_weights() -> Iterator[None]:
    before, _thread.untied = _thread.untied, True
    try:
        yield
    finally:
        _thread.untied = before


@contextmanager
def _guard_loaded_weights() -> Iterator[None]:
    before, _thread.guarded = _thread.guarded, True
    try:
        yield
    finally:
        _thread.guarded = before


def _guard_in_threads(initialization: Any) -> None:
    """Have torch's functions that initialize leave loaded weights alone where the thread is guarded, and only there."""
    for name, plain in initialization.TORCH_INIT_FUNCTIONS.items():
        chosen = _skip_if_loaded(plain, getattr(initialization, name))
        for place in map(sys.modules.get, initialization.TORCH_MODULES_TO_PATCH):
            if getattr(place, name, None) is plain:
                setattr(place, name, chosen)
    initialization.guard_torch_init_functions = _guard_loaded_weights


def _skip_if_loaded(plain: Any, guarded: Any) -> Any:
    @functools.wraps(plain)
    def initialize(*args: Any, **options: Any) -> Any:
        return (guarded if _thread.guarded else plain)(*args, **options)

    return initialize


def _skip_if_untied(tie: Any) -> Any:
    @functools.wraps(tie)
    def tie_weights(self: Any, *args: Any, **options: Any) -> Any:
        return None if _thread.untied else tie(self, *args, **options)

    return tie_weights


class _LinspaceOnCPU(TorchFunctionMode):
    """Has ``torch.linspace`` make its values where a device is not named: on none that holds no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.linspace:
            options.setdefault("device", "cpu")
        return func(*args, **options)


MODELING = "transformers.modeling_utils"
KNOWN = ("guard_torch_init_functions", "TORCH_INIT_FUNCTIONS", "TORCH_MODULES_TO_PATCH", "no_tie_weights")
VERSION_HINT = 'type pip install "layertap[transformers]"'
