"""Everything that a model computes for a batch, asked for over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
from safetensors.numpy import save

from tests.server import Live
from tests.service.support import Array, Json, arrays_of, npy, raw, tensor

EVERYTHING = ("*#*", "*#*:input", ".", ".:input")
LIMITS: dict[str, Any] = {
    "max_results": 1_000_000,
    "max_reply_bytes": 2**36,
    "max_body_bytes": 2**28,
    "max_queue_bytes": 2**34,
    "body_timeout_s": 600,
    "deadline_s": 1800,
    "decode_threads": 1,
}
MAX_BYTES = 100_000_000  # of one reply: server and client hold it several times over


def dry_run_shapes(live: Live, model: str, batch: Array, form: str = "npy") -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor, as a dry run tells them."""
    reply = _sent(live, batch, form, model=model, layers=",".join(EVERYTHING), dry_run="true", format="safetensors")
    return {key: (tuple(entry["shape"]), entry["dtype"]) for key, entry in reply.json()["features"].items()}


def all_tensors(
    live: Live, model: str, batch: Array, wanted: Mapping[str, Array], form: str = "npy", reply: str = "safetensors"
) -> Iterator[dict[str, Array]]:
    """Every tensor: in one reply to patterns, or in several to names where one would be large."""
    if sum(array.nbytes for array in wanted.values()) <= MAX_BYTES:
        yield arrays_of(_sent(live, batch, form, model=model, layers=",".join(EVERYTHING), format=reply))
        return
    inputs = [tensor(row) for row in batch]
    for names in slices(wanted):
        yield arrays_of(post_json(live, {"model": model, "inputs": inputs, "layers": names}, format=reply))


def post_json(live: Live, body: Json, **query: str) -> httpx.Response:
    """The good reply to a JSON request."""
    return _good(live.client.post("/extract", json=body, params=query, timeout=LIMITS["deadline_s"]))


def _sent(live: Live, batch: Array, form: str, **query: str) -> httpx.Response:
    request = raw(FORMS[form](batch), f"application/x-{form}", **query)
    return _good(live.client.post("/extract", **request, timeout=LIMITS["deadline_s"]))


def _good(reply: httpx.Response) -> httpx.Response:
    assert reply.status_code == 200, reply.text[:2000]
    return reply


def slices(wanted: Mapping[str, Array]) -> Iterator[list[str]]:
    """Names, so many at a time that a reply is not too large, but one at least."""
    names: list[str] = []
    room = MAX_BYTES
    for name, array in wanted.items():
        if names and array.nbytes > room:
            yield names
            names, room = [], MAX_BYTES
        names.append(name)
        room -= array.nbytes
    yield names


FORMS: dict[str, Callable[[Array], bytes]] = {"npy": npy, "safetensors": lambda batch: save({"x": batch})}
