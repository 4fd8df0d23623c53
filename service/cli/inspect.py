"""``layertap inspect``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from layertap.models.errors import LayertapError
from layertap.service.cli.console import say, show_status, stderr
from layertap.service.logs import escape_unprintable

if TYPE_CHECKING:
    from layertap.models.sources.architectures import Fit
    from layertap.models.sources.checkpoints import StateDict

MAX_SHOWN = 8
OWN = {"source": "python:PATH.py:FACTORY", "inputs": [{"name": "x", "shape": [3, 224, 224]}]}


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, an index of shards, or a folder.", exists=True)],
    prefix: Annotated[str, typer.Option(help="Of names in the checkpoint: what to look at.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the configuration alone, as JSON.")] = False,
) -> None:
    """Show what is in a checkpoint, which architectures fit it, and the configuration that serves it.

    No code of the checkpoint is run. What is printed is a configuration, with the rest as comments. The exit status is
    1 where no architecture fits: the lines are then for a factory of your own.
    """
    if not path.is_file() and not path.is_dir():
        raise LayertapError(f"{path} is no regular file", hint="give a checkpoint, an index of shards, or a folder")
    with show_status(f"looking for architectures that fit {path.name}"):
        from layertap.models.sources.architectures import find_fits
        from layertap.models.sources.checkpoints import read_checkpoint

        state = read_checkpoint(path, prefix)
        fits = find_fits(path, state)
    document = {"models": [_make_entry(path, prefix, fits)]}
    if as_json:
        say(json.dumps(document, indent=2))
    else:
        for line in _describe(path, state, fits):
            say(f"# {escape_unprintable(line)}")
        say(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())
    if not fits:
        stderr.print("no architecture of torchvision or timm fits: name a factory of your own")
        raise typer.Exit(1)


def _make_entry(path: Path, prefix: str, fits: Sequence[Fit]) -> dict[str, Any]:
    """What serves the checkpoint, from a configuration in the working directory."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.partition(".")[0]).strip("-._")[:100]
    entry: dict[str, Any] = {"name": name or "model", **(fits[0].describe() if fits else OWN)}
    if not fits or not fits[0].has_weights:
        entry["weights"] = f"{path}/" if path.is_dir() else str(path)
    return entry | ({"prefix": prefix} if prefix else {})


def _describe(path: Path, state: StateDict, fits: Sequence[Fit]) -> Iterator[str]:
    dtypes = Counter(str(value.dtype).removeprefix("torch.") for value in state.values())
    counts = ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.most_common())
    yield f"{path.name}: {len(state)} tensors, {sum(value.numel() for value in state.values()):,} values ({counts})"
    prefix = fits[0].prefix if fits else state.prefix
    facts = {"read": state.key, "taken off names": prefix, "not read": _join(state.unread)}
    yield from (f"{name}: {value}" for name, value in facts.items() if value)
    what = "config.json says" if fits and fits[0].has_weights else "fits"
    yield f"{what}: {_join([str(fit) for fit in fits]) or 'nothing that is known'}"
    if not fits:
        yield "the shape below is a guess: write your model's own, and its preprocess, labels and embedding"
    if len(fits) > 1:
        yield "the first of these is configured; others may compute or preprocess otherwise: choose what was trained"


def _join(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
