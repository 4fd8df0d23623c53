"""Compares how layers, of one model or of two, place the same inputs. To add a measure, add a table row.

A layer's features, (inputs, numbers), are reduced to what each measure needs of them, at most (inputs, inputs), before
the other model runs: a layer may have many numbers, and only tables are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.errors import RequestError, TooLargeError
from layertap.models.plan.requested import Measure
from layertap.models.run import fingerprint
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.features import Features

MAX_WORK = 2**31  # pairs of layers, times the cube of the number of inputs and what a pair takes anyway: some seconds
PAIR_WORK = 2**16
Numbers = NDArray[np.float64]
Side = tuple[Features, dict[Measure, list[Numbers]]]  # features without arrays; what is kept of each layer


@dataclass(frozen=True)
class MeasureSpec:
    """``describe``: what is kept of features, (inputs, numbers); ``compare``: the table of two sides by these.

    ``least``: how many inputs it needs.
    """

    describe: Callable[[Numbers], Numbers]
    compare: Callable[[Sequence[Numbers], Sequence[Numbers]], Numbers | Sequence[Numbers]]
    least: int = 2


def _scale(values: Numbers, axis: int | None = None) -> Numbers:
    """The values with a norm of 1; NaN if all are 0."""
    scaled: Numbers = values / np.linalg.norm(values, axis=axis, keepdims=axis is not None)
    return scaled


def _describe_products(features: Numbers) -> Numbers:
    centred = features - features.mean(0)
    return _scale((centred @ centred.T).ravel())


def _describe_distances(features: Numbers) -> Numbers:
    """The ranks of the distances (1 - Pearson) of all pairs of inputs; equal distances share their mean rank."""
    rows = _scale(features - features.mean(1, keepdims=True), 1)
    distances = (1 - rows @ rows.T)[np.triu_indices(len(rows), 1)]
    _, numbers, counts = np.unique(distances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[numbers] + 0 * distances  # NaN stays NaN
    return _scale(ranks - ranks.mean())


def _describe_shape(features: Numbers) -> Numbers:
    """(inputs, axes): the centred inputs in as many axes as they span, which changes no angle or length."""
    return _scale(np.linalg.qr((features - features.mean(0)).T, mode="r").T)  # type: ignore[attr-defined]  # an array


def _describe_unbiased(features: Numbers) -> Numbers:
    """A Gram matrix without its diagonal, centred so that the dot product of two is their unbiased HSIC."""
    rows = len(features)
    centred = features - features.mean(0)  # changes nothing but rounding
    products = centred @ centred.T
    np.fill_diagonal(products, 0)
    means = products.sum(0) / (rows - 2)
    products -= means + means[:, None] - means.sum() / (rows - 1)
    np.fill_diagonal(products, 0)
    described: Numbers = products.ravel() / np.sqrt(rows * (rows - 3))
    return described


def _correlate(first: Sequence[Numbers], second: Sequence[Numbers]) -> Numbers:
    table: Numbers = np.array(first) @ np.array(second).T
    return table


def _list_all(first: Sequence[Numbers], second: Sequence[Numbers]) -> Sequence[Numbers]:
    return first if second is first else [*first, *second]


def _find_distances(first: Sequence[Numbers], second: Sequence[Numbers]) -> Numbers:
    def find_distance(product: Numbers) -> float:
        return 2 - 2 * float(np.linalg.norm(product, "nuc")) if np.isfinite(product).all() else np.nan

    return np.array([[find_distance(one.T @ other) for other in second] for one in first])


MEASURES: Mapping[Measure, MeasureSpec] = {
    "cka": MeasureSpec(_describe_products, _correlate),
    "rsa": MeasureSpec(_describe_distances, _correlate),
    "procrustes": MeasureSpec(_describe_shape, _find_distances),
    "gram": MeasureSpec(lambda features: features @ features.T, _list_all),
    "hsic": MeasureSpec(
        _describe_unbiased, lambda first, second: _correlate(_list_all(first, second), _list_all(first, second)), 4
    ),
}


async def compare(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> dict[str, Any]:
    """The fields of the reply, with tables as arrays. Raises as ``Engine.extract``."""
    comparison = request.comparison
    if comparison is None:
        raise ValueError("the request asks for no comparison")
    asked = [replace(request, comparison=None, reply=ReplyOptions(limits=request.reply.limits))]
    if comparison.selectors:
        plain: dict[str, Any] = {"embedding": None, "interventions": (), "objective": None, "input_options": {}}
        asked.append(replace(asked[0], model=comparison.model, selectors=comparison.selectors, **plain))
    sent = await engine.fetch(asked[0], sent, ticket)
    sides: list[Side] = []
    for each in asked:
        try:
            features = await engine.extract(each, sent, ticket)
        except RequestError as error:
            if not sides:
                raise
            raise _point_to_other(error) from None
        known = [*(len(side[0].receipts) for side in sides), len(features.receipts)]
        _check_size(comparison.measures, features.rows, known, engine.settings.max_json_numbers)
        kept = 2 * 8 * features.rows**2 * len(features.arrays) * len(comparison.measures)
        ticket.reserve_bytes(kept + 3 * 8 * max(array.size for array in features.arrays.values()))
        describe = partial(_describe, features, comparison.measures)
        sides.append(await engine.run_in_thread(describe, ticket.deadline))
        del features, describe  # before the other model runs
    return await engine.run_in_thread(partial(_make_reply, sides), ticket.deadline)


def _point_to_other(error: RequestError) -> RequestError:
    """The error of the other model's layers, by the fields that name these."""
    faults = [
        replace(each, pointer=f"/with{each.pointer}") if each.pointer and each.input is None else each
        for each in error.faults
    ]
    return RequestError.from_faults(faults) if faults else error


def _check_size(measures: Sequence[Measure], rows: int, layers: Sequence[int], max_numbers: int) -> None:
    """TooLargeError for more pairs of layers than can be compared, or than a reply has numbers."""
    pairs = sum(layers) ** 2 if "hsic" in measures else layers[0] * layers[-1]
    numbers = sum(layers) * rows**2 if "gram" in measures else pairs
    if pairs * (rows**3 + PAIR_WORK) > MAX_WORK or max(numbers, pairs) > max_numbers:
        detail = f"the comparison of {pairs} pairs of layers by {rows} inputs is too large"
        raise TooLargeError(detail, hint="name fewer layers, or send fewer inputs")


def _describe(features: Features, measures: Sequence[Measure]) -> Side:
    """What the measures need of each layer; RequestError for a layer without a row of one size for each input."""
    for name in measures:
        if features.rows < (least := MEASURES[name].least):
            raise RequestError(f"{name} needs {least} inputs at least", hint="send more")
    kept: dict[Measure, list[Numbers]] = {name: [] for name in measures}
    for key, array in features.arrays.items():
        receipt = features.receipts[key]
        if features.by_input or receipt.row_axis != 0 or receipt.entries_per_row != 1:
            raise RequestError(f"{key} has no row of one size for each input", hint="name a pool, such as mean")
        scales = features.scales.get(key, np.ones(1)).reshape(-1, 1)  # of int8
        values = array.reshape(len(array), -1) * scales.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):  # a constant layer has NaN
            for name in measures:
                kept[name].append(MEASURES[name].describe(values))
    return replace(features, arrays={}), kept


def _make_reply(sides: Sequence[Side]) -> dict[str, Any]:
    """The fields of the reply."""
    (features, kept), (others, kept_others) = sides[0], sides[-1]
    tables = {name: MEASURES[name].compare(kept[name], kept_others[name]) for name in kept}
    digests = [each.fingerprint for each, _ in sides]
    return {
        "model": features.model,
        "other_model": others.model,
        "layers": list(features.receipts),
        "other_layers": list(others.receipts),
        "rows": features.rows,
        "fingerprint": fingerprint.digest_explanation(f"compare {list(kept)}", digests),
        "fingerprints": [digests[0], digests[-1]],
        "measures": tables,
        **({"warnings": [*warnings]} if (warnings := dict.fromkeys([*features.warnings, *others.warnings])) else {}),
    }
