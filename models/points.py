"""The nouns of a request: where to look, what to do with what is found there. Plain data, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SITES = ("output", "input")
Site = Literal["output", "input"]
Pool = Literal["none", "mean", "max", "gem", "cls", "flatten"]
ReplyDType = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class HookPoint:
    """One tensor of one call of one layer: ``layer3.0.relu``, call 2, path ``()``, site ``output``."""

    layer: str
    call: int
    path: tuple[str, ...]
    site: Site


@dataclass(frozen=True)
class Reduction:
    """What happens to a captured tensor on its device: narrow, pool, normalise, cast.

    ``channels`` and ``tokens`` keep those indices along their axis, in the order given. The order of steps is the
    order of fields. ``normalize`` is L2 over the last axis of a pooled result.
    """

    channels: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    pool: Pool = "none"
    normalize: bool = False
    dtype: ReplyDType = "float32"


@dataclass(frozen=True)
class Selector:
    """One entry of a request's ``layers``, parsed but not yet looked up.

    ``text`` is the request's own spelling; ``call`` None means the last one, "*" every one; ``path`` None means every
    leaf; ``alias`` is the key asked for by ``as``.
    """

    text: str
    pattern: str
    call: int | Literal["*"] | None = None
    path: tuple[str, ...] | None = None
    site: Site = "output"
    type: str | None = None
    reduction: Reduction = Reduction()
    alias: str | None = None

    @property
    def is_glob(self) -> bool:
        """Whether several layers may match; their keys are then canonical names."""
        return self.type is not None or "*" in self.pattern or "?" in self.pattern


def path_text(path: tuple[str, ...]) -> str:
    """A path as a selector writes it: ``[out][0]``."""
    return "".join(f"[{key}]" for key in path)
