"""What a configuration that is read anew changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration

NOT_LOADED = frozenset({"load", "required", "idle_timeout_s"})  # fields that the model itself does not depend on


@dataclass(frozen=True)
class Changes:
    """Names of models, of changed ones with the fields; aliases with their new models, None for one that is gone.

    ``default`` is the new one, None where it stays.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str | None]
    default: str | None

    def describe(self) -> dict[str, Any]:
        """As plain data: names only, no values."""
        return asdict(self)

    def needs_loading(self, name: str) -> bool:
        """Whether a changed model has to be loaded anew."""
        return not NOT_LOADED.issuperset(self.changed[name])


def compare(
    specs: Iterable[ModelSpec], default: str, aliases: Mapping[str, str], configuration: Configuration
) -> Changes:
    """What a configuration changes where these models, this default and these aliases are now."""
    old = {spec.name: spec for spec in specs}
    new = {spec.name: spec for spec in configuration.models}
    pairs = {name: (old[name], spec) for name, spec in new.items() if name in old}
    return Changes(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed={name: found for name, pair in pairs.items() if (found := _list_changed(*pair))},
        aliases={
            name: configuration.aliases.get(name)
            for name in {**aliases, **configuration.aliases}
            if aliases.get(name) != configuration.aliases.get(name)
        },
        default=configuration.default if configuration.default != default else None,
    )


def _list_changed(old: ModelSpec, new: ModelSpec) -> tuple[str, ...]:
    return tuple(each.name for each in fields(ModelSpec) if getattr(old, each.name) != getattr(new, each.name))
