"""Ways to run a forward, and what of them a configuration can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layertap.models.spec import DType, MemoryFormat


@dataclass(frozen=True)
class Variant:
    """Hooks on the model, or a compiled graph, which may be for one number of rows; ``options`` are the compiler's."""

    dtype: DType = "float32"
    memory_format: MemoryFormat = "contiguous"
    is_graph: bool = False
    is_static: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    def takes(self, rows: int) -> bool:
        """Whether there is something to measure: a graph for a single row is static anyhow."""
        return rows > 1 or not self.is_static


HOOKS = "hooks"
ONE_THREAD: Mapping[str, object] = {"cpp.threads": 1, "cpp.dynamic_threads": False}
VARIANTS = {
    HOOKS: Variant(),
    "hooks, channels_last": Variant(memory_format="channels_last"),
    "hooks, bfloat16": Variant("bfloat16", "channels_last"),
    "graph": Variant(is_graph=True),
    "graph, static": Variant(is_graph=True, is_static=True),
    "graph, one thread": Variant(is_graph=True, options=ONE_THREAD),
    "graph, frozen": Variant(is_graph=True, options={"freezing": True}),
    "graph, not frozen": Variant(is_graph=True, options={"freezing": False}),
    "graph, bfloat16": Variant("bfloat16", is_graph=True),
}
ARCHITECTURES = (
    "mobilenet_v3_small",
    "resnet18",
    "resnet50",
    "efficientnet_b0",
    "regnet_y_400mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
)
