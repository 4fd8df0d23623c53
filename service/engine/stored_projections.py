"""Projections that clients have sent once, by the digest of what they sent, for requests that name it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import sha256

from layertap.models.errors import RequestError, TooLargeError
from layertap.models.plan.projections import DIGEST, count_weights, make_step
from layertap.models.plan.requested import LinearStep
from layertap.service.inputs.arrays import read_safetensors


class StoredProjections(Mapping[str, LinearStep]):
    """Those used most recently, of ``max_bytes`` bytes together; any thread may call its methods."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._steps: OrderedDict[str, LinearStep] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, digest: str, data: bytes) -> int:
        """Keep the projection in a safetensors file, dropping others if there is no room; its bytes. For a thread.

        RequestError if it is no projection, or has another digest; TooLargeError.
        """
        if digest != (actual := f"{DIGEST}{sha256(data).hexdigest()}"):
            raise RequestError("the body has another digest than the address", hint=f"PUT /projections/{actual}")
        step = make_step(read_safetensors(data))
        if (size := count_bytes(step)) > self.max_bytes:
            hint = "send it as steps with fewer channels, or have the operator raise LAYERTAP_MAX_PROJECTION_BYTES"
            raise TooLargeError(f"the projection has {size} bytes, the server keeps {self.max_bytes}", hint=hint)
        with self._lock:
            self._steps.pop(digest, None)
            self._steps[digest] = step
            while sum(map(count_bytes, self._steps.values())) > self.max_bytes:
                self._steps.popitem(last=False)
        return size

    def __getitem__(self, digest: str) -> LinearStep:
        with self._lock:
            self._steps.move_to_end(digest)
            return self._steps[digest]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each by its digest, the least recently used first."""
        with self._lock:
            return {digest: count_bytes(step) for digest, step in self._steps.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self._steps)


def count_bytes(step: LinearStep) -> int:
    """Bytes of a step's tensors, which are float32."""
    return 4 * count_weights((step,))
