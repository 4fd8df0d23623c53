"""A model's embedding: the default tensor of a request without layers, and its pooling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import RequestError, SelectorError, escape
from layertap.models.plan.matches import find_matches, make_keys
from layertap.models.plan.options import check_channels, check_need, is_scores, raise_first
from layertap.models.plan.requested import Embedding, Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import format_path
from layertap.models.sources.build import Choice
from layertap.models.spec import EmbeddingSpec, Pool

HEAD = "what the head over classes takes"
OUTPUT = "the model's output: nothing else is known to be an embedding; 'embedding' in the configuration names a layer"

JOINT: tuple[Choice, ...] = ((EmbeddingSpec(".[text_embeds]"), "both towers together return it as text_embeds", False),)


@dataclass(frozen=True)
class ModelEmbedding:
    """A model's embedding: the selector, which pools it to a vector, the reason for this choice, and warnings.

    ``of_tokens``: it is a vector for each token instead.
    """

    selector: Selector
    reason: str
    warnings: tuple[str, ...] = ()
    of_tokens: bool = False


def choose_embedding(choices: Sequence[Choice], classifier: bool, catalog: Catalog) -> ModelEmbedding | None:
    """The first choice that the model has, else a classifier's input to its head, else the output.

    None if none of them has one entry for each input.
    """
    for choice in (*choices, *(_find_head(catalog) if classifier else ()), *_list_outputs(catalog)):
        with suppress(RequestError):
            return find_choice(choice, catalog)
    return None


def find_choice(choice: Choice, catalog: Catalog) -> ModelEmbedding:
    """The embedding that a choice names; raises what ``find_embedding`` raises."""
    spec, reason, is_guess = choice
    selector = find_embedding(spec.layer, catalog, spec.pool, spec.layout)
    of_tokens = spec.pool == "none" and find_matches(selector, catalog)[0][0].info.has_axis("T")
    selector = reduce_embedding(selector, Embedding(spec.pool, spec.normalize))
    return ModelEmbedding(selector, reason, (f"embedding: {reason}",) if is_guess else (), of_tokens)


def find_embedding(text: str, catalog: Catalog, pool: Pool | None, layout: str | None = None) -> Selector:
    """The selector of an embedding, with the pool that turns each row into a vector, unless one is given.

    UnknownLayerError or SelectorError unless it names exactly one tensor, with an entry for each row, of which the
    channels are known.
    """
    selector = replace(parse_selector(text), layout=layout)
    if selector.site not in ("output", "input"):
        raise SelectorError(f"{escape(text)} is no embedding", hint="name an output or an input")
    taps, _ = find_matches(selector, catalog)
    if len(taps) != 1 or selector.is_glob or selector.call == "*":
        keys = ", ".join(map(escape, make_keys(selector, taps[:5], catalog)))
        raise SelectorError(f"{escape(text)} names {len(taps)} tensors, an embedding is one", hint=f"name one: {keys}")
    info = taps[0].info
    raise_first(check_need("embedding", escape(text), info))
    if pool is None:
        raise_first(check_channels("an embedding", escape(text), info))
        pool = "none" if is_scores(info) else "mean" if info.has_axis("C") else "flatten"
    return replace(selector, reduction=Reduction(pool=pool))


def reduce_embedding(selector: Selector, embedding: Embedding) -> Selector:
    """The selector of an embedding with a request's options: the request's pool replaces the model's."""
    pool = embedding.pool or selector.reduction.pool
    normalize = embedding.normalize or (embedding.pool is None and selector.reduction.normalize)
    if embedding.pool is None and normalize and pool == "none":
        pool = "flatten"  # the same numbers; only pooled results are normalised
    reduction = Reduction(pool=pool, normalize=normalize, dtype=embedding.dtype)
    return replace(selector, reduction=reduction, alias=embedding.alias)


def _find_head(catalog: Catalog) -> Iterator[Choice]:
    """The input of the last layer with weights, if its output, pooled or not, is the model's output."""
    with_weights = [layer for layer in catalog.layers.values() if layer.calls and layer.is_leaf and layer.parameters]
    last = max(with_weights, key=lambda layer: layer.calls[-1].output.order, default=None)
    if last is not None and last.type in ("Linear", "Conv2d"):
        made = last.calls[-1].output.tensors[0].shape
        if (made if last.type == "Linear" else made[:2]) in {each.shape for each in catalog.outputs}:
            yield EmbeddingSpec(f"{last.name}:input"), HEAD, False


def _list_outputs(catalog: Catalog) -> Iterator[Choice]:
    """The output, if it is nothing but a vector for each row."""
    if len(catalog.outputs) == 1 and len(catalog.outputs[0].shape) == 2:
        yield EmbeddingSpec(f".{format_path(catalog.outputs[0].path)}"), OUTPUT, False
