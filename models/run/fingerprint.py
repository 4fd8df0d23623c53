"""Fingerprints: digests of everything that decides a vector's numbers; spaces: of what makes vectors comparable.

Equal fingerprints mean: the same weights, architecture (a library's name and arguments, or the operator's own code and
all that it reads), model dtype, preprocessing, layer, call, path, site, projection, grid, narrowing, statistics,
pooling, sample, normalisation and reply dtype. If the caller preprocessed the rows and sent tensors, that is included,
and so is their shape if it is not the configured one. The machine, the device, the time, the model's configured name
and its memory format are not included. The configured ``tf32`` is, even without a GPU that acts on it: its error is a
thousand times that of float32. So is a decoder that changes some pixels, even for pictures that it leaves unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Container, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

from torch import nn

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import UNPROVEN, UNREPEATABLE
from layertap.models.inputs.sound import Media
from layertap.models.plan.plan import ResolvedIntervention, ResolvedObjective
from layertap.models.plan.requested import Reduction, TensorData
from layertap.models.points import Point
from layertap.models.spec import Decode, InputSpec, Pool, Preprocessed, PreprocessSpec, Tower

RECIPE = 1  # raise it when the meaning of a pooling, a preprocessing step or a decoder changes
# Fields of an input that say what a survey sends; of its axis for rows another one than 0 counts; a list is a setting.
SURVEYED = frozenset({"values", "longest", "long_axis", "example", "batch_axis", "as_list"})
FOUND = frozenset({"info", "source", "is_view"})  # fields of a change that come from a catalog or another input
Variant = Literal["prompt", "sources", "dimensions", "precision", "batch", "generate"]
LEFT_OUT = frozenset({"training", "fused_attn"})  # timm's fused_attn depends on the machine
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def digest_architecture(source: str, settings: str = "", module: nn.Module | None = None) -> str:
    """A digest of an architecture: of ``source``, settings of the whole model that may be in no module, and its tree.

    Without a ``module`` the source is a library's name for the structure: a new version of the library may print, keep
    or nest more and compute the same; one that computes something else under that name is found by a probe. Of each
    module count its name, class, printed settings and plain attributes: not every module prints what matters,
    MultiheadAttention hides its number of heads.
    """
    if module is None:
        return _digest([source, settings])
    tree = [
        (name, type(part).__qualname__, _ADDRESS.sub("", part.extra_repr()), _list_settings(part))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    return _digest([source, tree, settings])


def digest_model(
    weights: str,
    structure: str,
    precision: str,
    preprocess: Media | None,
    inputs: Iterable[InputSpec],
    tokenizer: str = "",
    decode: Decode = "exact",
) -> str:
    """The model's part of every fingerprint, from the digests of its weights, its architecture and its tokenizer.

    ``decode`` counts if it changes numbers.
    ``precision`` is its dtype, or ``tf32`` if a GPU may use fewer bits than float32 has.
    """
    if preprocess is not None:
        is_changed = isinstance(preprocess, PreprocessSpec) and preprocess.changes_pixels(decode)
        row: object = preprocess.describe(), decode if is_changed else "exact"
    else:
        row = [_to_plain_data(spec, SURVEYED) for spec in inputs]
    if axes := {spec.name: spec.batch_axis for spec in inputs if spec.batch_axis}:
        row = row, axes
    return _digest([RECIPE, weights, structure, precision, row, tokenizer])


def digest_rows(
    model: str, preprocessed: Preprocessed, shapes: Iterable[tuple[int, ...]] | None, tower: Tower | None = None
) -> str:
    """The model's part for rows that were not preprocessed as configured; unchanged if they were.

    ``shapes``: of one row, input by input, if they are not the configured ones.
    ``tower``: which of two towers takes them.
    """
    of_tower = _digest([model, tower], model) if tower else model
    return _digest([of_tower, preprocessed, shapes], model) if preprocessed else of_tower


def digest_variant(digest: str, variant: Variant, *parts: object) -> str:
    """A fingerprint, or a part of one, of what differs from what has ``digest``.

    ``prompt``: texts have another prompt in front than the model's own; ``sources``: changes use tensors of other
    inputs, and ``parts`` are the changes made to these; ``dimensions``: vectors are cut to their first ones;
    ``precision``: their numbers are bits; ``batch``: rows depend on the other rows of their batch;
    ``generate``: texts are continued, and ``parts`` say how.
    """
    return _digest([RECIPE, variant, digest, *parts], digest)


def digest_result(
    model: str, point: Point, reduction: Reduction, changes: str | None = None, layout: str | None = None
) -> str:
    """The fingerprint of one result, from the model's part and, if any, the part of the changes it depends on.

    ``layout``: what ``get_given_layout`` says of its tensor.
    """
    return _digest([model, _to_plain_data(point), _to_plain_data(reduction), changes, layout], model)


def digest_space(
    model: str, point: Point, reduction: Reduction, changes: str | None = None, layout: str | None = None
) -> str:
    """The space of one result: cosines between vectors of one space mean something, however their inputs were made.

    ``model``: of its weights and its architecture, without what its inputs go through; the rest as ``digest_result``.
    Lengths, the reply's dtype and its shape change no direction.
    """
    pool: Pool = "none" if reduction.pool == "flatten" else reduction.pool
    reduction = replace(reduction, pool=pool, normalize=False, dtype="float32")
    return digest_result(model, point, reduction, changes, layout)


def get_given_layout(info: TensorInfo) -> str | None:
    """The layout that a request gave a tensor; None if it is the one that was found."""
    return info.layout if info.layout_given else None


def digest_explanation(method: str, results: Iterable[str]) -> str:
    """The fingerprint of a map that a method makes of results."""
    several = sorted(results)
    return _digest([RECIPE, method, several], *several)


def digest_changes(changes: Iterable[ResolvedIntervention | ResolvedObjective], start: str = "") -> str | None:
    """The part of a fingerprint for interventions, an objective and a layer to resume from; None if there are none.

    Fields from the catalog are left out: they depend on the input's shape, and fingerprints do not.
    """
    parts = [_describe_change(each) for each in changes]
    return _digest([parts, start]) if parts or start else None


def digest_reply(results: Iterable[str]) -> str:
    """The fingerprint of a whole reply: that of its only result, or a digest of all of them, in any order."""
    several = sorted(set(results))
    return several[0] if len(several) == 1 else _digest(several, *several)


def make_unrepeatable() -> str:
    """A placeholder fingerprint for a non-deterministic model: it equals no other."""
    return UNREPEATABLE + secrets.token_hex(8)


def make_unproven(identity: str) -> str:
    """A model's part of fingerprints if it holds what can't be read: another one each time that it is loaded."""
    return f"{UNPROVEN}{identity}.{secrets.token_hex(8)}"


def get_proven_part(identity: str) -> str:
    """What two loads of a model have in common in its part of fingerprints: all of it unless it is unproven."""
    return identity.partition(".")[0]


def _describe_change(change: ResolvedIntervention | ResolvedObjective) -> dict[str, Any]:
    """A change without its catalog fields and the index of the input that it takes a tensor from."""
    described = _to_plain_data(change, FOUND) | {"layout": get_given_layout(change.info)}
    if isinstance(change, ResolvedIntervention) and change.source is not None:
        described["operation"] = _to_plain_data(change.operation, FOUND)
        described["source"] = _to_plain_data(change.source.point)
    return described


def _to_plain_data(value: Any, left_out: Container[str] = ()) -> dict[str, Any]:
    """A dataclass as plain data, without fields that are None: an option that is not used counts nowhere."""
    entries = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in left_out}
    return {name: _to_plain_entry(entry) for name, entry in entries.items() if entry is not None}


def _to_plain_entry(entry: Any) -> Any:
    if isinstance(entry, TensorData):
        return {"shape": entry.shape, "data": entry.digest}
    if isinstance(entry, tuple):
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
        return "/" not in value and "\\" not in value  # a path depends on the machine
    return value is None or isinstance(value, (bool, int, float))


def _digest(value: object, *made_from: str) -> str:
    """A digest of plain data; one of other fingerprints is unrepeatable or unproven if one of these is."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    kinds = [kind for kind in (UNREPEATABLE, UNPROVEN) if any(each.startswith(kind) for each in made_from)]
    return "".join(kinds[:1]) + hashlib.sha256(text.encode()).hexdigest()[:32]
