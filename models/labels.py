"""Class names of a model, from the configuration or the weights; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layertap.models.errors import AbsentError, LoadError, escape, label_failures

Outputs = Literal["logits", "multi_label_logits", "probabilities", "log_probabilities"]
FORMS_HINT = 'give a .txt file with a name a line, or a .json file with ["cat", …] or {"0": "cat", …}'


@dataclass(frozen=True)
class Labels:
    """The names of all classes in order, and their source, as a word for people that never holds a directory."""

    names: tuple[str, ...]
    origin: str

    def describe(self) -> dict[str, object]:
        """Plain data for JSON: how many there are, and where from."""
        return {"count": len(self.names), "from": self.origin}


def name_classes(labels: Labels | None, classes: tuple[int, ...], layer: str) -> tuple[str, ...] | None:
    """The names of classes; None if they have none, as those of another layer's output than the model's."""
    return tuple(labels.names[number] for number in classes) if labels is not None and layer == "." else None


@label_failures("labels")
def read_labels(configured: tuple[str, ...] | str) -> Labels:
    """What a configuration's ``labels`` means: the names themselves, or the path of a file.

    AbsentError if there is no such file, or it holds no names; LoadError if no names are configured.
    """
    if isinstance(configured, str):
        path = Path(configured)
        labels = Labels(_read_file(path), path.name)
    else:
        labels = Labels(configured, "configuration")
    if not labels.names:
        kind = AbsentError if isinstance(configured, str) else LoadError
        raise kind("labels names no class", hint="leave it out, or name each class")
    return labels


@label_failures("labels")
def choose_labels(configured: tuple[str, ...] | str | None, known: Labels | None, classes: int | None) -> Labels | None:
    """The configured labels, which must name every class, else those known of the weights if they name every class.

    ``classes`` is None if the model's output has none. LoadError if the configured labels do not fit.
    """
    if configured is None:
        return known if known is not None and len(known.names) == classes else None
    labels = read_labels(configured)
    if len(labels.names) != classes:
        has = f"has {classes} classes" if classes is not None else "gives no scores of classes"
        raise LoadError(f"labels has {len(labels.names)} names, and the model {has}", hint="name each class once")
    return labels


def _read_file(path: Path) -> tuple[str, ...]:
    shown = escape(path.name)
    if path.suffix not in (".txt", ".json"):
        raise LoadError(f"labels {shown} are of a kind that is not read", hint=FORMS_HINT)
    if not path.is_file():
        raise AbsentError(f"there is no file {shown} of labels", hint="a relative path is beside the configuration")
    try:
        text = path.read_text("utf-8-sig")
        names = text.splitlines() if path.suffix == ".txt" else _list_names(json.loads(text))
    except (OSError, ValueError, KeyError) as error:
        raise AbsentError(f"labels can't be read from {shown}", hint=FORMS_HINT) from error
    return tuple(names)


def _list_names(value: object) -> list[str]:
    """The names in a list, or in a mapping from class number to name; ValueError or KeyError if it is neither."""
    if isinstance(value, Mapping):
        value = [value[str(number)] for number in range(len(value))]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("these are no names")
    return value
