"""LitServe with dynamic batches: a worker for each core, one torch thread each."""

# No postponed annotations here: LitServe looks at that of decode_request to know what to hand over.

import io
import os
from collections.abc import Sequence
from typing import Annotated

import litserve
import numpy as np
import torch
from fastapi import Depends, Request, Response
from torch import Tensor

from bench.peers.arguments import HOST, told
from bench.serving.plain import decoded, hooked, preset, seeded

# The quickest of those tried on two cores with MobileNetV3-small at 16 and 64 connections: 4, 8, 16 rows; 5, 10, 20 ms;
# 1, 2, 3 workers; also 2 ms with two API servers and the fast queue, and each of those alone at 5 ms.
ROWS = 8
TIMEOUT_S = 0.005
WORKERS = os.cpu_count() or 1
API_SERVERS = 1
FAST_QUEUE = False


async def body(request: Request) -> bytes:
    """The JPEG as it comes; without this LitServe takes a body for JSON."""
    return await request.body()


class Pooled(litserve.LitAPI):
    """The means of some layers' outputs over space, one after another in a vector."""

    def __init__(self, model: str, layers: Sequence[str]) -> None:
        super().__init__(max_batch_size=ROWS, batch_timeout=TIMEOUT_S)
        self.model, self.layers = model, layers

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.forward, self.prepare = hooked(seeded(self.model), self.layers), preset(self.model)

    def decode_request(self, request: Annotated[bytes, Depends(body)]) -> Tensor:
        return self.prepare(decoded(request))

    def batch(self, inputs: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(inputs))

    def predict(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            means = self.forward(batch)
            return torch.cat([means[layer] for layer in self.layers], 1)

    def unbatch(self, output: Tensor) -> list[np.ndarray]:
        return list(output.numpy())

    def encode_response(self, output: np.ndarray) -> Response:
        encoded = io.BytesIO()
        np.save(encoded, output)
        return Response(encoded.getvalue(), media_type="application/x-npy")


def main() -> None:
    """Serve until somebody ends it."""
    chosen = told()
    server = litserve.LitServer(
        Pooled(chosen.model, chosen.layers),
        accelerator="cpu",
        workers_per_device=WORKERS,
        fast_queue=FAST_QUEUE,
        timeout=60,
    )
    server.run(
        host=HOST,
        port=chosen.port,
        num_api_servers=API_SERVERS,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
