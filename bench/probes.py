"""How far probes move, and by what: threads, batches and kernels on one side, an epsilon on the other.

``python -m bench.probes`` prints a line for each architecture: shares of a probe's length, of random inputs and weights
that follow from their names. Tolerances in ``service/probes.py`` lie between the two sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.versions import fill_weights
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from layertap.service.probes import Probe, measure_change

ARCHITECTURES = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "vit_b_16",
    "swin_t",
    "convnext_tiny",
    "densenet121",
    "regnet_y_400mf",
    "vgg11_bn",
    "shufflenet_v2_x1_0",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FACTOR = 100  # of the epsilon of a norm, as between the conventions of two frameworks


def probe(module: nn.Module, rows: Tensor) -> Probe:
    """The probe of a module's output for the first of some rows."""
    with torch.no_grad():
        return Probe.of("tensors", module(rows)[:1].float().numpy())


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """That many threads for what is inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def measure_rounding(module: nn.Module, row: Tensor) -> float:
    """The farthest that a probe moves where nothing but threads, the batch or kernels differ."""
    base = probe(module, row)
    ways: list[tuple[Callable[[], object], Tensor]] = [
        (lambda: use_threads(2), row),
        (lambda: torch.backends.mkldnn.flags(enabled=False), row),  # type: ignore[no-untyped-call]
        (nullcontext, row.expand(4, -1, -1, -1)),
    ]
    moved = []
    for way, rows in ways:
        with way():  # type: ignore[attr-defined]
            moved.append(measure_change(base, probe(module, rows)))
    return max(moved)


def measure_epsilons(module: nn.Module, row: Tensor) -> list[float]:
    """How far a probe moves where the epsilon of one norm is another: of the first, a middle and the last one."""
    base = probe(module, row)
    norms = [part for part in module.modules() if isinstance(part, (nn.BatchNorm2d, nn.LayerNorm))]
    moved = []
    for norm in (norms[0], norms[len(norms) // 2], norms[-1]):
        before, norm.eps = norm.eps, norm.eps * FACTOR if norm.eps < 1e-4 else norm.eps / FACTOR
        moved.append(measure_change(base, probe(module, row)))
        norm.eps = before
    return moved


def main() -> None:
    """Measure every architecture."""
    torch.set_num_threads(1)
    table = Table(
        "architecture", *(f"{str(dtype).removeprefix('torch.')}, rounding" for dtype in DTYPES), "one epsilon"
    )
    for name in ARCHITECTURES:
        built = build_model(ModelSpec(name, f"torchvision:{name}", weights="random:0", device="cpu"))
        fill_weights(built.module)
        row = torch.randn(1, *built.inputs[0].shape, generator=torch.Generator().manual_seed(0))
        epsilons = measure_epsilons(built.module, row)
        rounding = [measure_rounding(built.module.to(dtype), row.to(dtype)) for dtype in DTYPES]
        table.add_row(name, *(f"{each:.0e}" for each in rounding), ", ".join(f"{each:.0e}" for each in epsilons))
    Console().print(table)


if __name__ == "__main__":
    main()
