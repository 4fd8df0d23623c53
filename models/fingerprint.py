"""What makes two vectors comparable, as one digest.

Equal fingerprints mean: the same weights, architecture (of a library its name and arguments, of own code all that can
be seen of it), model dtype, preprocessing, layer, call, path, site, projection,
narrowing, statistics, pooling, normalisation and reply dtype. Rows that came as tensors were preprocessed by the
caller: that goes in, and their shape where it is not the configured one. Nothing of the machine, the device, the time
or the model's configured name goes in, nor what only chooses between kernels of one precision, a memory format.
``tf32`` does go in, as configured, also where no GPU acts on it: what it lets through is a thousand times the error of
float32. So does a way of decoding that makes other pictures, also of those that it leaves as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from torch import nn

from layertap.models.errors import UNREPEATABLE
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.selection.hook_points import HookPoint, Reduction, TensorData
from layertap.models.selection.plan import ResolvedIntervention, ResolvedObjective
from layertap.models.selection.poolings import POOLINGS
from layertap.models.spec import Decode, InputSpec, Preprocessed, Tower

RECIPE = 1  # to be raised when the meaning of a pooling or a preprocessing step changes
DECODE_RECIPES = {"fast": "fast 2"}  # of ways of decoding that made other pixels before
SURVEYED = frozenset({"values", "longest", "long_axis", "example"})
KNOWN_HERE = ("info", "source", "is_view")  # of a change, what a catalogue or another input tells
# Options of requests that earlier versions did not have: None leaves their fingerprints as they were.
OMITTED_IF_NONE = frozenset({"reduction", "outputs", "edges", "each", "metric", "row", "project"})
LEFT_OUT = frozenset({"training", "fused_attn"})  # timm's fused_attn depends on the machine
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def digest_architecture(module: nn.Module, source: str, settings: str = "") -> str:
    """A digest of a module tree: source, and for each module its name, class, printed settings and plain attributes.

    The attributes because not every module prints what matters: a MultiheadAttention hides how many heads it has.
    ``settings`` are those of the whole that no module need show.
    """
    tree = [
        (name, type(part).__qualname__, _ADDRESS.sub("", part.extra_repr()), _list_settings(part))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    return _digest([source, tree, *([settings] if settings else [])])


def digest_named_architecture(source: str, settings: str = "") -> str:
    """A digest of an architecture that a library has under a name, which stands for its structure, and its settings.

    Nothing of the module tree goes in: a new version of the library may print, keep or nest more and compute the same.
    What a version computes otherwise under the same name is found by a probe, not here.
    """
    return _digest([source, settings])


def digest_model(
    weights: str,
    structure: str,
    precision: str,
    preprocess: Preprocessing | None,
    inputs: Iterable[InputSpec],
    tokenizer: str = "",
    decode: Decode = "exact",
) -> str:
    """The model's part of every fingerprint, from the digests of its weights, its architecture and its tokenizer.

    ``decode`` counts where it makes other numbers.
    ``precision`` is its dtype, or ``tf32`` where a GPU may read fewer bits than its float32 has.
    """
    row = _describe_picture(preprocess, decode) if preprocess else [_describe_input(spec) for spec in inputs]
    return _digest([RECIPE, weights, structure, precision, row, *([tokenizer] if tokenizer else [])])


def digest_rows(
    model: str, preprocessed: Preprocessed, shapes: Iterable[tuple[int, ...]] | None, tower: Tower | None = None
) -> str:
    """The model's part for rows that it did not make as it is configured to; as it is where it did.

    ``shapes``: of one row, input by input, where they are not the configured ones.
    ``tower``: the one of two that takes them.
    """
    of_tower = _digest([model, tower]) if tower else model
    return _digest([of_tower, preprocessed, shapes]) if preprocessed else of_tower


def digest_prompt(model: str, prompt: str) -> str:
    """The model's part for texts with another prompt in front of them than its own."""
    return _digest([RECIPE, "prompt", model, prompt])


def digest_result(
    model: str, point: HookPoint, reduction: Reduction, changes: str | None = None, *, of_text: bool = False
) -> str:
    """The fingerprint of one result, from the model's part and that of the changes that it depends on, if any.

    ``of_text``: its tensor has tokens of a text. A pool that leaves class tokens out once left a text's first out too.
    """
    pooling = POOLINGS[reduction.pool]
    all_tokens = of_text and pooling.combines and pooling.skips_prefix
    parts = [*([changes] if changes else []), *([{"pooled": "all tokens"}] if all_tokens else [])]
    return _digest([model, _to_plain_data(point), _to_plain_data(reduction), *parts])


def digest_explanation(method: str, results: Iterable[str]) -> str:
    """The fingerprint of a map that a method makes of results."""
    return _digest([RECIPE, method, sorted(results)])


def digest_changes(changes: Iterable[ResolvedIntervention | ResolvedObjective], start: str = "") -> str | None:
    """The part of a fingerprint for interventions, an objective and a layer to go on from; None where there are none.

    What they found in a catalogue is left out: it depends on the shape of the input, as no other fingerprint does. That
    a tensor has tokens goes in: earlier versions changed and counted padding like other tokens.
    """
    parts: list[object] = [_describe_change(each) for each in changes]
    if start:
        parts.append({"resume": start})
    return _digest(parts) if parts else None


def digest_sources(result: str, changes: Iterable[str]) -> str:
    """The fingerprint of a result whose changes take tensors of inputs that are themselves changed so."""
    return _digest([RECIPE, "sources", result, *changes])


def digest_dimensions(result: str, dimensions: int) -> str:
    """The fingerprint of a result whose vectors are cut to their first ``dimensions``."""
    return _digest([RECIPE, "dimensions", result, dimensions])


def digest_batch(result: str) -> str:
    """The fingerprint of a result of which each row depends on those that it ran with."""
    return _digest([RECIPE, "batch", result])


def digest_reply(results: Iterable[str]) -> str:
    """The fingerprint of a whole reply: that of its only result, or one of the set of them, in any order.

    Where one of them can't be repeated, neither can the whole.
    """
    several = sorted(set(results))
    unrepeatable = [each for each in several if each.startswith(UNREPEATABLE)]
    return (unrepeatable or several)[0] if len(several) == 1 or unrepeatable else _digest(several)


def make_unrepeatable() -> str:
    """What stands for the fingerprint of a model that gives another answer each time: it equals no other."""
    return UNREPEATABLE + secrets.token_hex(8)


def _describe_change(change: ResolvedIntervention | ResolvedObjective) -> dict[str, Any]:
    """A change without what is only here or now: what a catalogue knows of it, which input a tensor is taken of."""
    described = {name: value for name, value in _to_plain_data(change).items() if name not in KNOWN_HERE}
    if isinstance(change, ResolvedIntervention) and change.source is not None:
        operation = {name: value for name, value in described["operation"].items() if name != "source"}
        described |= {"operation": operation, "source": _to_plain_data(change.source.point)}
    return described | ({"tokens": "own"} if change.info.token_axes else {})


def _describe_picture(how: Preprocessing, decode: Decode) -> dict[str, Any]:
    """How a picture becomes a row; exact decoding goes without saying."""
    return how.describe() | ({"decode": DECODE_RECIPES.get(decode, decode)} if how.changes_pixels(decode) else {})


def _describe_input(spec: InputSpec) -> dict[str, Any]:
    """An input without what only says which others may be sent, and what a survey sends."""
    return {name: value for name, value in asdict(spec).items() if name not in SURVEYED}


def _to_plain_data(value: Any) -> dict[str, Any]:
    """A dataclass as plain data."""
    entries = {field.name: getattr(value, field.name) for field in fields(value)}
    entries = {name: entry for name, entry in entries.items() if entry is not None or name not in OMITTED_IF_NONE}
    if isinstance(value, HookPoint):  # as it was written when functions were captured only
        function = entries.pop("function")
        if function and value.site in ("output", "input"):
            entries |= {"path": (*function.rsplit("#", 1), value.site, *value.path), "site": "function"}
        elif function:
            entries |= {"path": (*function.rsplit("#", 1), *value.path), "site": f"function:{value.site}"}
    return {name: _to_plain_entry(entry) for name, entry in entries.items()}


def _to_plain_entry(entry: Any) -> Any:
    if isinstance(entry, TensorData):
        return {"shape": entry.shape, "data": entry.digest}
    if isinstance(entry, tuple) and is_dataclass(next(iter(entry), None)):
        return [_to_plain_entry(each) for each in entry]
    return _to_plain_data(entry) if is_dataclass(entry) else entry


def _list_settings(part: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(part).items()
        if _is_plain(value) and name not in LEFT_OUT and not name.startswith("_")
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) and not isinstance(item, (tuple, list)) for item in value)
    if isinstance(value, str):
        return "/" not in value and "\\" not in value  # a path is of one machine
    return value is None or isinstance(value, (bool, int, float))


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
