"""A model's embedding: the default tensor of a request without layers, and its pooling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from layertap.models.catalog.catalog import Catalog, Layer, TensorInfo
from layertap.models.errors import RequestError, SelectorError, escape
from layertap.models.plan.matches import find_matches, unknown_channels_error
from layertap.models.plan.requested import Embedding, Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import format_path
from layertap.models.spec import EmbeddingChoice, Pool

ALLOWED_SITES = ("output", "input")
HEAD = "what the head over classes takes"
OUTPUT = "the model's output: nothing else is known to be an embedding; 'embedding' in the configuration names a layer"


JOINT = (EmbeddingChoice(".[text_embeds]", "both towers together return it as text_embeds"),)


@dataclass(frozen=True)
class ModelEmbedding:
    """A model's embedding: the selector, which pools it to a vector, the reason for this choice, and warnings."""

    selector: Selector
    reason: str
    warnings: tuple[str, ...] = ()


def choose_embedding(choices: tuple[EmbeddingChoice, ...], classifier: bool, catalog: Catalog) -> ModelEmbedding | None:
    """The first choice that the model has, else a classifier's input to its head, else the output.

    None if none of them has one entry for each input.
    """
    for choice in (*choices, *(_find_head(catalog) if classifier else ()), *_list_outputs(catalog)):
        with suppress(RequestError):
            return find_choice(choice, catalog)
    return None


def find_choice(choice: EmbeddingChoice, catalog: Catalog) -> ModelEmbedding:
    """The embedding that a choice names; raises what ``find_embedding`` raises."""
    selector = find_embedding(choice.layer, catalog, choice.pool, choice.layout)
    selector = reduce_embedding(selector, Embedding(choice.pool, choice.normalize))
    return ModelEmbedding(selector, choice.reason, (f"embedding: {choice.reason}",) if choice.guessed else ())


def find_embedding(text: str, catalog: Catalog, pool: Pool | None, layout: str | None = None) -> Selector:
    """The selector of an embedding, with the pool that turns each row into a vector, unless one is given.

    UnknownLayerError or SelectorError unless it names exactly one tensor, with an entry for each row, of which the
    channels are known.
    """
    selector = replace(parse_selector(text), layout=layout)
    if selector.site not in ALLOWED_SITES:
        raise SelectorError(f"{escape(text)} is no embedding", hint="name an output or an input")
    matches, _ = find_matches(selector, catalog)
    if len(matches) != 1 or selector.is_glob or selector.call == "*":
        keys = ", ".join(escape(match.key) for match in matches[:5])
        raise SelectorError(
            f"{escape(text)} names {len(matches)} tensors, an embedding is one", hint=f"name one: {keys}"
        )
    info = matches[0].info
    if info.row_axis is None or info.crosses_rows:
        raise SelectorError(f"{escape(text)} does not hold one entry for each input", hint="name another layer")
    if pool is None and len(info.shape) > 1 and not info.has_axis("C"):
        raise unknown_channels_error(matches[0], "an embedding")
    return replace(selector, reduction=Reduction(pool=pool or _choose_pool(info)))


def reduce_embedding(selector: Selector, embedding: Embedding) -> Selector:
    """The selector of an embedding with a request's options: the request's pool replaces the model's."""
    pool = embedding.pool or selector.reduction.pool
    normalize = embedding.normalize or (embedding.pool is None and selector.reduction.normalize)
    if embedding.pool is None and normalize and pool == "none":
        pool = "flatten"  # the same numbers; only pooled results are normalised
    reduction = Reduction(pool=pool, normalize=normalize, dtype=embedding.dtype)
    return replace(selector, reduction=reduction, alias=embedding.alias)


def _choose_pool(info: TensorInfo) -> Pool:
    if len(info.shape) == 2 and info.row_axis == 0 and info.entries_per_row == 1:
        return "none"
    return "mean" if info.has_axis("C") else "flatten"


def _find_head(catalog: Catalog) -> Iterator[EmbeddingChoice]:
    """The input of the last layer with weights, if its output, pooled or not, is the model's output."""
    last = max(catalog.layers.values(), key=_get_end)
    if last.type in ("Linear", "Conv2d"):
        made = last.calls[-1].output.tensors[0].shape
        returned = {each.shape for each in catalog.outputs}
        if (made if last.type == "Linear" else made[:2]) in returned:
            yield EmbeddingChoice(f"{last.name}:input", HEAD)


def _list_outputs(catalog: Catalog) -> Iterator[EmbeddingChoice]:
    """The output, if it is nothing but a vector for each row."""
    if len(catalog.outputs) == 1 and len(catalog.outputs[0].shape) == 2:
        yield EmbeddingChoice(f".{format_path(catalog.outputs[0].path)}", OUTPUT)


def _get_end(layer: Layer) -> float:
    """When the last call of a layer with weights ends; -1 for other layers."""
    return layer.calls[-1].output.order if layer.calls and layer.is_leaf and layer.parameters else -1
