"""What a module took of a checkpoint; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from layertap.models.errors import escape, format_names

MAX_NAMES = 100


@dataclass(frozen=True)
class LoadReport:
    """What a module took of a checkpoint.

    ``key``: the dictionary in the file; ``prefix``: what was taken off names; ``missing``: the module's names that the
    file does not have; ``left_over``: the file's that the module does not; ``unread``: what else stands in the file;
    ``adapter``: the folder of the adapter that was merged.
    """

    key: str = ""
    prefix: str = ""
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    adapter: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What every answer has to say: the values of missing tensors were drawn at random."""
        if not self.missing:
            return ()
        shown = format_names([escape(name) for name in self.missing])
        return (f"the checkpoint lacks weights of this model, which are random: {shown}",)

    def describe(self) -> dict[str, Any]:
        """The report for JSON, without what is empty; of names how many there are, and the first of them."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: {"count": len(value), "names": list(value[:MAX_NAMES])} if isinstance(value, tuple) else value
            for name, value in facts.items()
            if value
        }
