"""What ``PUT /models/NAME`` may bring: what the configuration file names, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from layertap.models.errors import escape
from layertap.models.grammar import is_checkpoint
from layertap.models.spec import ModelSpec
from layertap.service.errors import ForbiddenError

# Fields of a model that may change, or have a rule of their own.
FREE = frozenset(
    {
        *("name", "source", "weights", "adapter", "labels", "args"),
        *("prefix", "strict", "embedding", "dimensions", "outputs", "load", "required", "idle_timeout_s"),
        "tf32",  # nobody may change it, which is told elsewhere
    }
)
HINT = "who runs the server adds it to 'allow' in the configuration file"
ENTRY_HINT = "who runs the server changes the configuration file; POST /models/reload reads it"


@dataclass(frozen=True)
class Allowed:
    """Sources, weights and files of labels as they may be written, and names of arguments; adapters are weights.

    Paths are absolute; weights and labels that end in a slash are folders. What the file says of the model itself is
    always allowed, and what it leaves to the default.
    """

    sources: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    args: tuple[str, ...] = ()

    def check(self, spec: ModelSpec, configured: ModelSpec) -> None:
        """ForbiddenError where a model's next version has what neither this nor its entry in the file names."""
        checked = {
            "source": spec.source in self.sources,
            "weights": spec.weights in self.weights
            or (is_checkpoint(spec.weights) and _is_within(spec.weights, self.weights)),
            "adapter": not spec.adapter or _is_within(spec.adapter, self.weights),
            "labels": not isinstance(spec.labels, str)
            or spec.labels in self.labels
            or _is_within(spec.labels, self.labels),
        }
        for name, allowed in checked.items():
            if not allowed and getattr(spec, name) != getattr(configured, name):
                raise ForbiddenError(f"this {name!r} is not allowed", hint=HINT)
        given = configured.args if spec.source == configured.source else {}
        for name in sorted(spec.args.keys() | given.keys()):
            changed = name not in spec.args or name not in given or spec.args[name] != given[name]
            if changed and name not in self.args:
                if name not in spec.args:
                    hint = f'send the whole entry; "args" has {escape(name)} in the configuration file'
                    raise ForbiddenError(f"argument {escape(name)} is missing", hint=hint)
                raise ForbiddenError(f"argument {escape(name)} is not allowed", hint=HINT)
        default = ModelSpec(spec.name, spec.source)
        for name in (each.name for each in fields(ModelSpec) if each.name not in FREE):
            if getattr(spec, name) not in (getattr(configured, name), getattr(default, name)):
                raise ForbiddenError(f"another {name!r} is not allowed", hint=ENTRY_HINT)


def _is_within(path: str, allowed: tuple[str, ...]) -> bool:
    """Whether a file, wherever links lead, is in one of the folders of what is allowed."""
    if "\0" in path:  # no file has such a name, and looking for one raises ValueError
        return False
    folders = (Path(each).resolve() for each in allowed if each.endswith("/"))
    return any(Path(path).resolve().is_relative_to(folder) for folder in folders)
