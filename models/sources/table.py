"""The kinds of source that a model may come from: one row for each; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.sources.grammar import get_base_name, is_file, is_folder, show_factory, show_folder
from layertap.models.sources.source_checks import (
    CheckContext,
    check_directory,
    check_factory,
    check_timm_architecture,
    check_torchvision_architecture,
)


def _has_none(ident: str) -> bool:
    return False


def _is_factory_of_file(ident: str) -> bool:
    return is_file(ident.rpartition(":")[0])


@dataclass(frozen=True)
class ModelSource:
    """One kind of source, which a configuration writes in front of a colon.

    ``example`` shows how it is written. ``module`` has ``build(ident, spec)``, which gives a BuiltModel, and is
    imported when it is first used. ``check`` refuses, with a LoadError, what can be seen to be wrong without torch.
    ``extra`` is the library, and the extra of this package, that it needs. ``has_path`` tells whether what follows the
    colon is, or begins with, a path, ``show`` what anyone may see of it. ``downloads``: weights that are neither a file
    nor a seed come from the network.
    """

    example: str
    module: str
    check: Callable[[str, CheckContext], None] | None = None
    extra: str | None = None
    has_path: Callable[[str], bool] = _has_none
    show: Callable[[str], str] = str
    downloads: bool = False


def parse_source(text: str) -> tuple[ModelSource, str]:
    """A source's row and what follows the colon; LoadError where it is not KIND:NAME with a kind that there is."""
    kind, _, ident = text.partition(":")
    source = SOURCES.get(kind)
    if source is not None and ident:
        return source, ident
    *examples, last = (row.example for row in SOURCES.values())
    hint = f"type {', '.join(examples)} or {last}"
    shown = escape(get_base_name(kind))
    if not ident:
        raise LoadError(f"source {shown} has no KIND: in front of a name", hint=hint)
    matches = tuple(f"{name}:{get_base_name(ident)}" for name in find_nearest(kind, SOURCES))
    raise LoadError(f"sources of kind {shown} are not known", hint=suggest(matches) or hint)


SOURCES: dict[str, ModelSource] = {
    "torchvision": ModelSource(
        "torchvision:ARCH", "layertap.models.sources.torchvision", check_torchvision_architecture, downloads=True
    ),
    "timm": ModelSource(
        "timm:ARCH",
        "layertap.models.sources.timm",
        check_timm_architecture,
        extra="timm",
        has_path=is_folder,
        show=show_folder,
        downloads=True,
    ),
    "transformers": ModelSource(
        "transformers:PATH",
        "layertap.models.sources.transformers",
        check_directory,
        extra="transformers",
        has_path=bool,
        show=get_base_name,
    ),
    "python": ModelSource(
        "python:package.module:factory",
        "layertap.models.sources.python",
        check_factory,
        has_path=_is_factory_of_file,
        show=show_factory,
    ),
}
