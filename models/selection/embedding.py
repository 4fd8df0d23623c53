"""A model's embedding: the one tensor that a request without layers means, and what makes a vector of it; no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from layertap.models.catalog.catalog import Catalog, Layer, TensorInfo
from layertap.models.errors import RequestError, SelectorError, escape
from layertap.models.selection.hook_points import Embedding, Reduction, Selector, format_path
from layertap.models.selection.matches import find_matches
from layertap.models.selection.poolings import Pool
from layertap.models.selection.selectors import parse_selector

ALLOWED_SITES = ("output", "input")


def find_default_embedding(catalog: Catalog) -> Selector | None:
    """What goes into the head, else the model's output; None where neither will do.

    The head is the last layer with weights that runs, where that is a fully connected one.
    """
    last = max(catalog.layers.values(), key=_get_end)
    outputs = [f".{format_path(leaf.path)}" for leaf in catalog.layers["."].calls[0].output.tensors]
    for text in (*([f"{last.name}:input"] if last.type == "Linear" else []), *outputs):
        with suppress(RequestError):
            return find_embedding(text, catalog)
    return None


def find_embedding(text: str, catalog: Catalog) -> Selector:
    """The selector of an embedding, with the pool that makes a vector of each row.

    UnknownLayerError, SelectorError where it names not just one tensor with an entry for each row.
    """
    selector = parse_selector(text)
    if selector.site not in ALLOWED_SITES:
        raise SelectorError(f"{escape(text)} is no embedding", hint="name an output or an input")
    matches, _ = find_matches(selector, catalog)
    if len(matches) != 1 or selector.is_glob or selector.call == "*":
        keys = ", ".join(escape(match.key) for match in matches[:5])
        raise SelectorError(
            f"{escape(text)} names {len(matches)} tensors, an embedding is one", hint=f"name one: {keys}"
        )
    leaf = matches[0].tensor
    if leaf.row_axis is None or leaf.mixed:
        raise SelectorError(f"{escape(text)} does not hold one entry for each input", hint="name another layer")
    return replace(selector, reduction=Reduction(pool=_choose_pool(leaf)))


def reduce_embedding(selector: Selector, embedding: Embedding) -> Selector:
    """The selector of an embedding with what a request wants done to it."""
    pool = embedding.pool or selector.reduction.pool
    if embedding.pool is None and embedding.normalize and pool == "none":
        pool = "flatten"  # the same numbers; only what is pooled is normalised
    reduction = Reduction(pool=pool, normalize=embedding.normalize, dtype=embedding.dtype)
    return replace(selector, reduction=reduction, alias=embedding.alias)


def _choose_pool(leaf: TensorInfo) -> Pool:
    if len(leaf.shape) == 2 and leaf.row_axis == 0 and leaf.entries_per_row == 1:
        return "none"
    return "mean" if leaf.layout is not None and "C" in leaf.layout else "flatten"


def _get_end(layer: Layer) -> int:
    """When a layer with weights of its own ends, for the last time."""
    return layer.calls[-1].output.order if layer.calls and layer.is_leaf and layer.parameters else -1
