"""Modules from a factory that the operator names: ``python:package.module:factory``."""

from __future__ import annotations

import difflib
import importlib
import sys
from contextlib import suppress

from torch import nn

from layertap.models.construction import seeded
from layertap.models.errors import LoadError, near, quoted
from layertap.models.grammar import origin
from layertap.models.sources import Built, building, switches
from layertap.models.spec import ModelSpec
from layertap.models.weights import load_into, read_checkpoint


def build(ident: str, spec: ModelSpec) -> Built:
    """What ``factory()`` returns; DEFAULT leaves the weights as it made them, and ``inputs`` must be configured.

    An attribute ``num_prefix_tokens`` of the module, where there is one, says how many tokens stand before the patches.
    Raises LoadError where the module, the factory, its result, the inputs or the weights are not as they should be.
    """
    if not spec.inputs:
        raise LoadError(
            "source python: can't tell what the model takes", hint="add inputs: name, shape and dtype of each"
        )
    weights = origin(spec.weights)
    if weights.label != "DEFAULT" and weights.seed is None and weights.path is None:
        raise LoadError(f"a python: factory has no weights named {quoted(weights.label)}", hint=WEIGHTS_HINT)
    state = read_checkpoint(weights.path) if weights.path else None
    module = _made(ident, weights.seed)
    if state is not None:
        load_into(module, state, weights.label)
    return Built(
        module=module,
        inputs=spec.inputs,
        preprocess=None,
        architecture=f"python:{ident.removeprefix(OWN)}",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        weights="as built" if weights.label == "DEFAULT" else weights.label,
    )


def _made(ident: str, seed: int | None) -> nn.Module:
    name, _, factory = ident.partition(":")
    if not name or not factory.isidentifier() or not all(part.isidentifier() for part in name.split(".")):
        raise LoadError("source python: needs a module and a factory", hint="type python:package.module:factory")
    shown = f"the factory {quoted(f'{name}:{factory}')}"
    with building(shown), seeded(seed):
        made = _factory(name, factory)
        if "transformers" in sys.modules:
            with suppress(LoadError):  # a version without what could be isolated
                switches.isolate()
        module = made()
    if not isinstance(module, nn.Module):
        raise LoadError(f"{shown} returned {quoted(type(module).__name__)}, not a torch.nn.Module")
    compiled = next((name or "." for name, part in module.named_modules() if _hides_parts(part)), None)
    if compiled is not None:
        raise LoadError(
            f"{shown} returned a model whose part {quoted(compiled)} is compiled: hooks on what is in it would not run",
            hint="let the factory return it without torch.compile",
        )
    return module


def _hides_parts(module: nn.Module) -> bool:
    """Whether a module's forward is compiled, so that hooks that come later are ignored."""
    if module._compiled_call_impl is not None:  # its own hooks too
        return True
    # A wrapper by torch.compile has such a forward, and what it wraps as a part. One that never compiles does no harm.
    forward = getattr(module, "forward", None)
    compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return compiled and next(module.children(), None) is not None


def _factory(name: str, factory: str) -> type[object]:
    try:
        loaded = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = quoted(error.name or name)
        hint = "install it, or run where it can be imported"
        raise LoadError(f"there is no Python module {missing}", hint=hint) from error
    # The name is the operator's own configuration; nothing from a request comes here.
    found = getattr(loaded, factory, None)
    if not callable(found):
        matches = difflib.get_close_matches(factory, vars(loaded), n=3)
        hint = near(tuple(f"python:{name}:{match}" for match in matches))
        raise LoadError(f"Python module {quoted(name)} has no factory {quoted(factory)}", hint=hint)
    return found  # type: ignore[no-any-return]


WEIGHTS_HINT = "type DEFAULT, PATH.safetensors, PATH.pth or random:SEED"
OWN = "layertap."  # the digests of our own models are of a time when the package had no name in front
