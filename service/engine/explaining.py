"""Explanations: what each method has captured, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from models import explanations, fingerprint
from models.catalog import Catalog, Leaf
from models.errors import SelectorError, quoted
from models.points import Explanation, HookPoint, Method, Objective, Selector, path_text
from models.selectors import find
from service.engine.engine import Engine, SizeCheck
from service.engine.job import Ask
from service.features import Array, Features

VALUES, GRADIENTS = "values", "gradients"
TOP = Objective("logit", "top")


@dataclass(frozen=True)
class _Method:
    """Where a method looks, whether it wants the values there beside their gradients, what it makes of them."""

    place: Callable[[Explanation, Catalog], tuple[HookPoint, Leaf]]
    values: bool
    make: Callable[[Mapping[str, Array], Leaf], Array]


async def explain(engine: Engine, ask: Ask, wanted: Explanation, fits: SizeCheck) -> Features:
    """The map that a request asks for, one for each row, under the method's name; what ``Engine.extract`` raises.

    Without an objective it is of each row's own highest score.
    """
    model = await engine.fleet.model(ask.model, ask.deadline)
    method = METHODS[wanted.method]
    point, leaf = method.place(wanted, model.catalog)
    sites = ({VALUES: "output"} if method.values else {}) | {GRADIENTS: f"grad_{point.site}"}
    asked = replace(
        ask,
        selectors=tuple(_selector(point, alias, site) for alias, site in sites.items()),
        objective=ask.objective or TOP,
    )
    features = await engine.extract(asked, fits)
    return await engine.off_loop(partial(_made, features, wanted.method, leaf), ask.deadline)


def _made(features: Features, name: Method, leaf: Leaf) -> Features:
    array = METHODS[name].make(features.arrays, leaf)
    receipt = features.receipts[GRADIENTS]
    told = fingerprint.of_explanation(name, (each.fingerprint for each in features.receipts.values()))
    return replace(
        features,
        fingerprint=told,
        arrays={name: array},
        receipts={name: replace(receipt, layout="NHW", fingerprint=told)},
    )


def _selector(point: HookPoint, alias: str, site: str) -> Selector:
    text = f"{point.layer}#{point.call}{path_text(point.path)}:{site}"
    return Selector(text, point.layer, point.call, point.path, site, alias=alias)  # type: ignore[arg-type]


def _layer(wanted: Explanation, catalog: Catalog) -> tuple[HookPoint, Leaf]:
    """The layer asked for, else the last one that returns a map."""
    if wanted.selector is None:
        return explanations.last_map(catalog)
    found, _ = find(wanted.selector, catalog)
    maps = [item for item in found if explanations.is_map(item.leaf) and item.point.site == "output"]
    if len(maps) != 1:
        raise SelectorError(
            f"{quoted(wanted.selector.text)} names {len(maps)} outputs that are maps", hint="name one layer of maps"
        )
    return maps[0].point, maps[0].leaf


def _input(wanted: Explanation, catalog: Catalog) -> tuple[HookPoint, Leaf]:
    """The model's input."""
    if wanted.selector is not None:
        raise SelectorError("saliency is of the model's input", hint="leave 'layer' out, or use method 'grad_cam'")
    leaves = catalog.layers["."].calls[0].input.leaves
    maps = [leaf for leaf in leaves if explanations.is_map(leaf)]
    if not maps:
        raise SelectorError("this model takes no pictures")
    return HookPoint(".", 0, maps[0].path, "input"), maps[0]


METHODS: dict[Method, _Method] = {
    "grad_cam": _Method(_layer, True, lambda found, leaf: explanations.grad_cam(found[VALUES], found[GRADIENTS], leaf)),
    "saliency": _Method(_input, False, lambda found, leaf: explanations.saliency(found[GRADIENTS], leaf)),
}
