"""The FastAPI app that a blog reader writes: forward hooks under a lock, one picture a forward, lists as JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import uvicorn
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from torch import Tensor, nn

from bench.peers.arguments import HOST, told
from bench.serving.plain import decoded, preset, seeded


def app(name: str, layers: tuple[str, ...]) -> FastAPI:
    """``POST /extract?layers=A,B``: the mean of each layer's output over space; these layers where none are named."""
    api = FastAPI()
    model, prepare, lock = seeded(name), preset(name), threading.Lock()

    def extracted(data: bytes, wanted: list[str]) -> dict[str, list[float]]:
        batch = prepare(decoded(data)).unsqueeze(0)
        kept: dict[str, Tensor] = {}

        def keeper(layer: str) -> Callable[[nn.Module, object, Tensor], None]:
            return lambda module, inputs, output: kept.update({layer: output.mean((2, 3))})

        with lock:
            handles = [model.get_submodule(layer).register_forward_hook(keeper(layer)) for layer in wanted]
            try:
                with torch.inference_mode():
                    model(batch)
            finally:
                for handle in handles:
                    handle.remove()
        return {layer: kept[layer][0].tolist() for layer in wanted}

    @api.post("/extract")
    async def extract(request: Request) -> dict[str, list[float]]:
        wanted = request.query_params.get("layers", ",".join(layers)).split(",")
        return await run_in_threadpool(extracted, await request.body(), wanted)

    return api


if __name__ == "__main__":
    chosen = told()
    uvicorn.run(app(chosen.model, chosen.layers), host=HOST, port=chosen.port, access_log=False)
