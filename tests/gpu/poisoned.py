"""A server whose model fails an assertion in a kernel: ``python -m tests.gpu.poisoned`` tells what it answers then."""

from __future__ import annotations

import json
import os
import sys

import httpx
import numpy as np
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import KIND
from tests.server import serving
from tests.service.support import npy, raw

SIZE, BEYOND = 4, 99


class Table(nn.Module):
    """Looks up a row of a table; on an accelerator an index beyond it is seen by the kernel only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x)
        return out


def ask(client: httpx.Client, index: int) -> int:
    """The status of a request for an entry."""
    request = raw(npy(np.array([index], np.int64)), "application/x-npy", layers="table", model="table")
    return client.post("/extract", **request).status_code


def main() -> None:
    """One good request, one bad, two good ones; then the process ends without tidying up what can't be."""
    inputs = (InputSpec("x", (1,), "int64"),)
    spec = ModelSpec("table", "python:tests.gpu.poisoned:Table", weights="random:0", device=KIND, inputs=inputs)
    with serving(Configuration((spec,), "table")) as live:
        told = {
            "before": [ask(live.client, 1), live.client.get("/livez").status_code],
            "poisoned": ask(live.client, BEYOND),
            "after": [ask(live.client, 1), ask(live.client, 2), live.client.get("/livez").status_code],
            "state": live.client.get("/models/table").json()["state"],
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
