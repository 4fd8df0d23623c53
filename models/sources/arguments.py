"""Constructor arguments that a configuration gives a model: checked by name, and told as text for fingerprints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layertap.models.errors import LoadError, escape, find_nearest, suggest

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def list_parameters(*called: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what can be given by name to any of these."""
    signatures = [inspect.signature(each).parameters.values() for each in called]
    return tuple(dict.fromkeys(each.name for parameters in signatures for each in parameters if each.kind in NAMED))


def refuse_unknown_arguments(args: Mapping[str, Any], known: Collection[str], shown: str) -> None:
    """LoadError where a constructor does not take an argument, with the nearest names that it takes, or all."""
    for name in args:
        if name not in known:
            hint = suggest(find_nearest(name, known, 3)) or f"it takes {', '.join(known) or 'none'}"
            raise LoadError(f"{shown} takes no argument {escape(name)}", hint=hint)


def refuse_reserved_arguments(args: Mapping[str, Any], reserved: Mapping[str, str], shown: str) -> None:
    """LoadError where another field of the configuration decides an argument; ``reserved`` says what to type."""
    for name in args:
        if name in reserved:
            raise LoadError(f"args of {shown} can't have {escape(name)}", hint=reserved[name])


def describe_arguments(args: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """The arguments ``without`` some as text, the same in any order; empty where there are none."""
    described = {name: value for name, value in args.items() if name not in without}
    return json.dumps(described, sort_keys=True) if described else ""
