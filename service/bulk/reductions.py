"""Reductions: summaries of many inputs, kept instead of vectors. To add one, add its functions and a table row.

A reduction folds batches into its state one after another, in float64: an interrupted job resumes with its saved state,
and ends with the same bits. States are arrays by name, by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from layertap.service.features import Array

MAX_COVARIANCE = 10_000  # channels of all layers together: 800 MB
BLOCK_ROWS = 256  # of a covariance that are updated at once
ALL_LAYERS = ""  # stands for a layer's name
CKA, HSIC = "cka", "hsic"  # a reduction, and the measure of a comparison that it sums
MIN_BLOCK = 4  # inputs that HSIC needs
UNMERGEABLE = ("rsa", "procrustes", "gram")  # measures of whose values for blocks none for all inputs can be made
Numbers = NDArray[np.float64]
State = dict[str, Any]  # arrays
States = dict[str, State]
_HALF_OCTAVES = 2.0 ** (np.arange(-20, 21) / 2)
_LARGEST = float(np.finfo(np.float32).max)
EDGES: tuple[float, ...] = tuple(
    np.array([-_LARGEST, *-_HALF_OCTAVES[::-1], 0, *_HALF_OCTAVES, _LARGEST], np.float32).tolist()
)


@dataclass(frozen=True)
class Batch:
    """Statistics of some inputs: for each layer, by name, (rows, channels) or (rows, channels, bins).

    ``numbers``: of the inputs in the source, ascending; ``top``: how many inputs to keep for each channel.
    """

    numbers: NDArray[np.int64]
    layers: Mapping[str, Mapping[str, Array]]
    top: int


@dataclass(frozen=True)
class Reduction:
    """``stats``: the statistics it needs of each input; ``add``: the states after a batch; ``finish``: the results.

    ``add`` may change the given states' arrays: if it fails, they are unusable.
    """

    stats: tuple[str, ...]
    add: Callable[[States, Batch], States]
    finish: Callable[[States], dict[str, Array]]


def _add_by_layer(add: Callable[[State, Mapping[str, Array], Batch], State]) -> Callable[[States, Batch], States]:
    return lambda states, batch: {
        layer: add(states.get(layer, {}), columns, batch) for layer, columns in batch.layers.items()
    }


def _finish_by_layer(finish: Callable[[State], State]) -> Callable[[States], dict[str, Array]]:
    return lambda states: {
        f"{layer}.{name}": array for layer, state in states.items() for name, array in finish(state).items()
    }


def _add_stats(state: State, columns: Mapping[str, Array], batch: Batch) -> State:
    """Chan's formula, because a difference of squares would lose digits."""
    counts, means, stds = (columns[name].astype(np.float64) for name in ("count", "mean", "std"))
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    added: State = {
        "count": count,
        "mean": mean,
        "squares": (counts * (stds**2 + (means - mean) ** 2)).sum(0),
        "min": columns["min"].min(0),
        "max": columns["max"].max(0),
        "zeros": np.rint(counts * columns["zeros"]).sum(0),
    }
    if not state:
        return added
    total, difference = state["count"] + count, mean - state["mean"]
    share = count / total
    return {
        "count": total,
        "mean": state["mean"] + difference * share,
        "squares": state["squares"] + added["squares"] + difference**2 * state["count"] * share,
        "min": np.minimum(state["min"], added["min"]),
        "max": np.maximum(state["max"], added["max"]),
        "zeros": state["zeros"] + added["zeros"],
    }


def _finish_stats(state: State) -> State:
    count = state["count"]
    spread = {"std": np.sqrt(state["squares"] / count), "min": state["min"], "max": state["max"]}
    return {"count": count.astype(np.int64), "mean": state["mean"], **spread, "zeros": state["zeros"] / count}


def _add_top(state: State, columns: Mapping[str, Array], batch: Batch) -> State:
    """The inputs with the greatest maxima; of equal ones, those that came first; NaN comes last."""
    maxima = columns["max"].T
    found = {
        "top": maxima,
        "top_inputs": np.broadcast_to(batch.numbers, maxima.shape),
        "top_places": columns["argmax"].T.astype(np.int64),
    }
    found = {name: np.concatenate([state[name], array], axis=1) for name, array in found.items()} if state else found
    order = np.argsort(-found["top"], axis=1, kind="stable")[:, : batch.top]
    return {name: np.take_along_axis(array, order, 1) for name, array in found.items()}


def _add_histogram(state: State, columns: Mapping[str, Array], batch: Batch) -> State:
    counts = columns["histogram"].astype(np.int64).sum(0)
    return {"histogram": state["histogram"] + counts if state else counts}


def _finish_histogram(states: States) -> dict[str, Array]:
    return {"histogram_edges": np.array(EDGES, np.float32), **_finish_by_layer(dict)(states)}


def _add_covariance(states: States, batch: Batch) -> States:
    """By the means over positions, with all layers' channels side by side: linear CKA needs each pair of layers."""
    values = np.concatenate([columns["mean"] for columns in batch.layers.values()], axis=1).astype(np.float64)
    means = values.mean(0)
    centred, rows, before = values - means, np.array(float(len(values))), np.array(0.0)
    if states:
        before = states[ALL_LAYERS]["rows"]
        difference = means - np.concatenate([states[layer]["mean"] for layer in batch.layers])
        means = means - difference * (before / (before + rows))
        centred = np.concatenate([centred, difference[None] * np.sqrt(before * rows / (before + rows))])
    products = states[ALL_LAYERS]["products"] if states else np.zeros((len(means), len(means)))
    _add_products(products, centred)
    ends = np.cumsum([columns["mean"].shape[1] for columns in batch.layers.values()])[:-1]
    by_layer = {layer: {"mean": mean} for layer, mean in zip(batch.layers, np.split(means, ends), strict=True)}
    return {**by_layer, ALL_LAYERS: {"rows": before + rows, "products": products}}


def _add_products(products: Numbers, centred: Numbers) -> None:
    """Add ``centred.T @ centred`` in place, because another matrix of that size would double the memory."""
    block = np.empty((min(BLOCK_ROWS, len(products)), len(products)))
    for start in range(0, len(products), BLOCK_ROWS):
        rows = products[start : start + BLOCK_ROWS]
        rows += np.matmul(centred[:, start : start + BLOCK_ROWS].T, centred, out=block[: len(rows)])


def _finish_covariance(states: States) -> dict[str, Array]:
    """The covariance of each layer's channels, (channels, channels), and linear CKA of all layers, (layers, layers)."""
    products, rows = states[ALL_LAYERS]["products"], states[ALL_LAYERS]["rows"]
    spans, start = {}, 0
    for layer, state in states.items():
        if layer != ALL_LAYERS:
            spans[layer] = slice(start, start + len(state["mean"]))
            start = spans[layer].stop
    similar = np.array([[(products[a, b] ** 2).sum() for b in spans.values()] for a in spans.values()])
    covariances = {f"{layer}.covariance": products[span, span] / rows for layer, span in spans.items()}
    return {**covariances, "cka": _find_cka(similar), "cka_layers": np.array(list(spans))}


def _find_cka(similar: Numbers) -> Numbers:
    """CKA of all pairs of layers by their HSIC, (layers, layers), or anything proportional to it."""
    lengths = np.sqrt(similar.diagonal())
    table: Numbers = similar / np.outer(lengths, lengths)
    return table


def _add_hsic(state: State, columns: Mapping[str, Array], batch: Batch) -> State:
    """Each input has the table of its block: blocks count by their inputs."""
    added = {"sum": columns[HSIC].sum(0), "rows": np.array([len(columns[HSIC])])}
    return {name: state[name] + array for name, array in added.items()} if state else added


def _finish_hsic(states: States) -> dict[str, Array]:
    """Unbiased HSIC of all pairs of layers, a mean over blocks; minibatch CKA by it."""
    total, rows = states[HSIC]["sum"], states[HSIC]["rows"]
    return {"cka": _find_cka(total), "hsic": total / rows, "cka_rows": rows[0]}


REDUCTIONS = {
    "stats": Reduction(
        ("count", "mean", "std", "min", "max", "zeros"), _add_by_layer(_add_stats), _finish_by_layer(_finish_stats)
    ),
    "top": Reduction(("max", "argmax"), _add_by_layer(_add_top), _finish_by_layer(dict)),
    "histogram": Reduction(("histogram",), _add_by_layer(_add_histogram), _finish_histogram),
    "covariance": Reduction(("mean",), _add_covariance, _finish_covariance),
    CKA: Reduction((HSIC,), _add_by_layer(_add_hsic), _finish_hsic),
}


def make_entry(entry: str | dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The entry of ``layers`` with the statistics that these reductions need."""
    stats = list(dict.fromkeys(each for name in names for each in REDUCTIONS[name].stats))
    edges = {"edges": EDGES} if "histogram" in stats else {}
    layer = {"layer": entry} if isinstance(entry, str) else entry
    return {**layer, "stats": stats, "by": "channel", **edges}


@dataclass
class Reducer:
    """The states of a job's reductions, by name; ``columns``: the names of each result's statistics."""

    names: Sequence[str]
    top: int
    columns: Mapping[str, Sequence[str]]
    states: dict[str, States] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        states = (state for by_layer in self.states.values() for state in by_layer.values())
        return sum(array.nbytes for state in states for array in state.values())

    def add(self, arrays: Mapping[str, Array], numbers: NDArray[np.int64]) -> None:
        """Fold the statistics of some inputs, (rows, channels, columns) of each layer, into all states."""
        if not len(numbers):
            return
        layers = {layer: _split_columns(arrays[layer], names) for layer, names in self.columns.items()}
        batch = Batch(numbers, layers, self.top)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity show in the results
            self.states = {name: REDUCTIONS[name].add(self.states.get(name, {}), batch) for name in self.names}

    def finish(self) -> dict[str, Array]:
        """All results by name; none if no input had any."""
        with np.errstate(invalid="ignore", divide="ignore"):  # the CKA of a constant layer is NaN
            finished = [REDUCTIONS[name].finish(states) for name, states in self.states.items()]
        return {key: array for results in finished for key, array in results.items()}

    def save(self, path: Path) -> None:
        """Write the states as a safetensors file."""
        arrays = {
            f"{name}|{key}|{layer}": np.ascontiguousarray(array)
            for name, states in self.states.items()
            for layer, state in states.items()
            for key, array in state.items()
        }
        save_file(arrays, path)

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Restore states that ``save`` wrote."""
        self.states = {}
        for text in sorted(arrays, key=self._find_layer_index):
            name, key, layer = text.split("|", 2)
            self.states.setdefault(name, {}).setdefault(layer, {})[key] = arrays[text]

    def _find_layer_index(self, text: str) -> int:
        """The position of a state's layer among all layers."""
        return [*self.columns, ALL_LAYERS].index(text.split("|", 2)[2])


def _split_columns(array: Array, names: Sequence[str]) -> dict[str, Array]:
    """Statistics by name; a histogram's bins in one array."""
    return {name: array[..., column] for column, name in enumerate(names) if "[" not in name} | {
        "histogram": array[..., [column for column, name in enumerate(names) if name.startswith("histogram[")]]
    }
