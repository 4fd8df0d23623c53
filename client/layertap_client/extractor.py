"""The service in the shape of a local extractor, as torchvision's ``create_feature_extractor`` makes one."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, Unpack

import numpy as np

from layertap_client.arrays import Array, to_array
from layertap_client.bodies import ExtractOptions
from layertap_client.client import Client
from layertap_client.errors import FingerprintChangedError, InputError, TooLargeError
from layertap_client.results import Result
from layertap_client.transport import URL

BODY_SHARE = 0.9  # of the server's limit; the rest is for what stands around arrays


class Activations(OrderedDict[str, Any]):
    """Arrays or tensors by name; ``fingerprint`` and ``receipts`` say what they are."""

    fingerprint: str = ""
    receipts: Mapping[str, Mapping[str, Any]] = {}


class RemoteExtractor:
    """Called with a batch, it gives the layers' values: numpy for numpy, torch's tensors for torch's.

    A batch may have any number of rows: it is sent in as many requests as the server's limits ask for. Models of
    several inputs take keyword arguments. No gradient flows back. FingerprintChangedError where the server's model
    changes within a batch.
    """

    def __init__(self, client: Client, names: Mapping[str, str], options: ExtractOptions) -> None:
        self.client = client
        self.names = dict(names)
        self.options = options

    def __call__(self, batch: Any = None, /, **named: Any) -> Activations:
        """What the layers give for a batch, rows on axis 0; LayertapError."""
        given = named or {"": batch}
        template = next(iter(given.values()))
        _check_gradients(given.values())
        arrays = {name: to_array(value) for name, value in given.items()}
        rows = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(rows) != 1 or not min(rows):
            raise InputError("give a batch: one array with rows on axis 0, or as many rows of each named input")
        results = self._extract(arrays, rows.pop())
        return self._join(results, template)

    def eval(self) -> Self:
        """Itself: models of a server are never in training."""
        return self

    def to(self, *args: Any, **options: Any) -> Self:
        """Itself: where the model is, the server decides; tensors come back to the device of the batch."""
        return self

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def __repr__(self) -> str:
        return f"RemoteExtractor({self.client!r}, {self.names!r})"

    def _extract(self, arrays: Mapping[str, Array], rows: int) -> list[Result]:
        """The results of all rows, in as many requests as it takes."""
        limits = self._limits
        row_bytes = max(1, sum(array.nbytes for array in arrays.values()) // rows)
        size = int(min(limits["max_inputs"], limits["max_body_bytes"] * BODY_SHARE // row_bytes))
        size, results, start = max(1, min(size, rows)), [], 0
        while start < rows:
            part = {name: array[start : start + size] for name, array in arrays.items()}
            inputs: Any = part.get("", {"tensors": part})
            try:
                results.append(self.client.extract(inputs, list(self.names), **self.options))
            except TooLargeError:
                if size == 1:
                    raise
                size //= 2
                continue
            start += size
        return results

    def _join(self, results: Sequence[Result], template: Any) -> Activations:
        if len({result.fingerprint for result in results}) > 1:
            raise FingerprintChangedError("the server's model changed within a batch: run it again")
        joined = Activations()
        for key in results[0]:
            axis = results[0].receipts[key].get("row_axis", 0)
            parts = [result[key] for result in results]
            whole = parts[0] if axis is None or len(parts) == 1 else np.concatenate(parts, axis)
            joined[self.names.get(key, key)] = _convert(whole, template)
        joined.fingerprint, joined.receipts = results[0].fingerprint, results[0].receipts
        return joined

    @cached_property
    def _limits(self) -> Mapping[str, float]:
        return self.client.models().limits


def hooks(
    model: str | None,
    /,
    return_nodes: Mapping[str, str] | Sequence[str],
    *,
    url: str = URL,
    client: Client | None = None,
    **options: Unpack[ExtractOptions],
) -> RemoteExtractor:
    """What stands in for ``create_feature_extractor(model, return_nodes)``, with the model at a server.

    ``model``: its name there, None for the server's default. ``return_nodes``: layers and what they are to be called,
    or layers alone. ``client`` is used, or one of ``url``. ``options``: those of ``ExtractOptions``.
    """
    names = dict(return_nodes) if isinstance(return_nodes, Mapping) else {name: name for name in return_nodes}
    if not names:
        raise InputError("name at least one layer")
    if model is not None:
        options["model"] = model
    return RemoteExtractor(client or Client(url), names, options)


def _check_gradients(values: Iterable[Any]) -> None:
    if any(getattr(value, "requires_grad", False) for value in values):
        raise InputError("no gradient flows back from a server: detach the batch, or ask for 'LAYER:grad_output'")


def _convert(array: Array, template: Any) -> Any:
    """An array as the batch was: a tensor on its device where that was one."""
    if not hasattr(template, "detach"):
        return array
    torch = importlib.import_module("torch")  # where there is a tensor there is torch
    return torch.from_numpy(array).to(template.device)
