"""Attention weights and their gradients, against softmax(QKᵀ) written out from each module's own weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.errors import InputError, RequestError
from layertap.models.hooks import attach
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation, TensorData
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.spec import InputSpec
from tests.models.extraction import run_plan
from tests.nets import SinkAttention, swin, vit
from tests.oracle import record, seeded

ROWS = 3
Change = Callable[[Tensor], Tensor]
# A module, its input, a change of the weights: weights (N, heads, T, T) as they were changed, output.
Hand = Callable[[Any, Tensor, Change], tuple[Tensor, Tensor]]


def unchanged(weights: Tensor) -> Tensor:
    """The same."""
    return weights


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(N, T, C) as (N, heads, T, C / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def softmax(scores: Tensor) -> Tensor:
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def multi_head(module: nn.MultiheadAttention, x: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    """nn.MultiheadAttention of x with itself."""
    assert module.in_proj_weight is not None
    query, key, value = (
        heads_of(x @ weight.T + bias, module.num_heads)
        for weight, bias in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    weights = change(softmax(torch.einsum("nhqd,nhkd->nhqk", query, key) / math.sqrt(query.shape[-1])))
    joined = torch.einsum("nhqk,nhkd->nqhd", weights, value).flatten(2)
    return weights, joined @ module.out_proj.weight.T + module.out_proj.bias


def timm_vit(module: Any, x: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    """The ViT attention of timm: one projection, heads within each third."""
    query, key, value = (
        heads_of(part, module.num_heads) for part in (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1)
    )
    weights = change(softmax(torch.einsum("nhqd,nhkd->nhqk", query, key) * query.shape[-1] ** -0.5))
    joined = torch.einsum("nhqk,nhkd->nqhd", weights, value).flatten(2)
    return weights, joined @ module.proj.weight.T + module.proj.bias


def windowed(module: Any, x: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    """Swin: windows of a rolled map, a bias for each relative position, no look across the seam."""
    side = module.window_size[0]
    tall, wide = x.shape[1:3]
    padded = functional.pad(x, (0, 0, 0, -wide % side, 0, -tall % side))
    count, height, width, channels = padded.shape
    down, right = (by if size > side else 0 for by, size in zip(module.shift_size, (height, width), strict=True))
    rolled = padded.roll((-down, -right), (1, 2))
    reach = 2 * side - 1
    bias = torch.zeros(module.num_heads, side * side, side * side, dtype=x.dtype)
    for a in range(side * side):
        for b in range(side * side):
            place = (a // side - b // side + side - 1) * reach + a % side - b % side + side - 1
            bias[:, a, b] = module.relative_position_bias_table[place].detach()
    corners = [(r, top, left) for r in range(count) for top in range(0, height, side) for left in range(0, width, side)]
    found, values = [], []
    for row, top, left in corners:
        window = rolled[row, top : top + side, left : left + side].reshape(1, side * side, channels)
        query, key, value = (
            heads_of(part, module.num_heads)[0]
            for part in (window @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1)
        )
        # Within a window that holds the seam only what lay together before the roll looks at each other.
        parts = [
            (down > 0 and top + at // side >= height - down, right > 0 and left + at % side >= width - right)
            for at in range(side * side)
        ]
        apart = torch.tensor([[one != other for other in parts] for one in parts])
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        found.append(softmax(scores + bias - 100.0 * apart))
        values.append(value)
    weights = change(torch.stack(found))
    out = torch.zeros_like(rolled)
    joined = (weights @ torch.stack(values)).transpose(1, 2).flatten(2) @ module.proj.weight.T + module.proj.bias
    for (row, top, left), window in zip(corners, joined, strict=True):
        out[row, top : top + side, left : left + side] = window.view(side, side, channels)
    return weights, out.roll((down, right), (1, 2))[:, :tall, :wide]


class Functional(nn.Module):
    """Attention within a block whose class says nothing of it: a causal one and one with fewer keys' heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads_of(part, 4) for part in self.qkv(x).chunk(3, -1))
        causal = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        mask[0] = False  # this query may look at nothing
        mask[2, 1] = False
        shared = functional.scaled_dot_product_attention(
            query, key[:, :2], value[:, :2], attn_mask=mask, enable_gqa=True
        )
        return self.head((causal + shared).transpose(1, 2).flatten(2).mean(1))


class FoldedAttention(nn.Module):
    """Rows and heads in one axis, softmax by a part of its own, weights that are overwritten later."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(8, 24)
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads_of(part, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1))
        weights = self.soft(query @ key.transpose(1, 2))
        out = weights @ value
        weights.zero_() if not weights.requires_grad else None
        return out.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


class Folded(nn.Module):
    """Holds attention that folds."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FoldedAttention()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x).mean(1))


def folded(module: FoldedAttention, x: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    query, key, value = (heads_of(part, 2) for part in (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1))
    weights = change(softmax(query @ key.transpose(2, 3)))
    return weights, (weights @ value).transpose(1, 2).flatten(2)


class Sinking(Folded):
    """Holds attention with sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SinkAttention()


def sinking(module: SinkAttention, x: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    query, key, value = (heads_of(part, 2) for part in (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1))
    exponentials = (query @ key.transpose(2, 3)).exp()
    weights = change(exponentials / (exponentials.sum(-1, keepdim=True) + module.sinks.exp().reshape(-1, 1, 1)))
    return weights, (weights @ value).transpose(1, 2).flatten(2)


class Careless(nn.Module):
    """A kernel that leaves weights out at random, evaluated or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @torch.inference_mode()  # operations come whole: dropout hides in the kernel
    def forward(self, x: Tensor) -> Tensor:
        y = heads_of(self.linear(x), 2)
        return functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5).transpose(1, 2).flatten(2)


def timm_net(fused: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=5)
        for block in net.blocks:
            block.attn.fused_attn = fused
        return seeded(net, 5)

    return build


@dataclass(frozen=True)
class Case:
    """A model, the shape of its row, which of its layers attend, their attention by hand, and how ours sees it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layers: tuple[str, ...]
    hand: Hand
    how: str


SELF = "encoder.layers.encoder_layer_{}.self_attention"
CASES = {
    "vit": Case(vit, (3, 32, 32), (SELF.format(0), SELF.format(1)), multi_head, "recomputed"),
    "timm fused": Case(timm_net(True), (3, 32, 32), ("blocks.0.attn", "blocks.1.attn"), timm_vit, "recomputed"),
    "timm": Case(timm_net(False), (3, 32, 32), ("blocks.0.attn", "blocks.1.attn"), timm_vit, "observed"),
    "swin": Case(
        swin,
        (3, 32, 48),
        ("features.1.0.attn", "features.1.1.attn", "features.3.0.attn", "features.3.1.attn"),
        windowed,
        "observed",
    ),
    "folded": Case(lambda: seeded(Folded(), 7), (5, 8), ("attention",), folded, "observed"),
    "sinks": Case(lambda: seeded(Sinking(), 7), (5, 8), ("attention",), sinking, "observed"),
}


def prepared(case: Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Catalog, Tensor]:
    """A model with frozen weights, its catalog, a batch of rows."""
    module = case.build().to(dtype).eval().requires_grad_(False)
    x = torch.randn(ROWS, *case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    return module, surveyed(module, *case.shape, dtype=dtype), x


def surveyed(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Catalog:
    specs = (InputSpec("x", shape, str(dtype).removeprefix("torch.")),)
    return survey(module, specs, lambda rows: module(*rows.values()), torch.device("cpu"), 0, dtype)


def plan_for(catalog: Catalog, *texts: str, objective: Objective | None = None) -> Plan:
    return make_plan([parse_selector(text) for text in texts], catalog, objective=objective)


def run(module: nn.Module, plan: Plan, x: Tensor) -> dict[str, Tensor]:
    """The project's results, by key."""
    return run_plan(module, x, plan)


def entered(module: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What entered a layer, whatever number of times it was handed over."""
    seen = record(module, x)
    return seen.get((layer, 0, (), "input"), seen.get((layer, 0, ("0",), "input"), torch.empty(0)))


@contextmanager
def by_hand(
    module: nn.Module, case: Case, kept: dict[str, Tensor], change: Change = unchanged, changed: str = ""
) -> Iterator[None]:
    """Every attention of a model replaced by the one written here, weights kept in the graph; one may be changed."""

    def replaced(layer: str) -> Callable[..., Any]:
        def after(part: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            weights, result = case.hand(part, args[0], change if layer == changed else unchanged)
            kept[layer] = weights
            if layer != changed:
                torch.testing.assert_close(result, out[0] if isinstance(out, tuple) else out)
            return (result, None) if isinstance(out, tuple) else result

        return after

    handles = [module.get_submodule(layer).register_forward_hook(replaced(layer)) for layer in case.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def same_state(module: nn.Module) -> list[Any]:
    """What must be after a request as it was before it."""
    flags = [(part.training, getattr(part, "fused_attn", None), "forward" in vars(part)) for part in module.modules()]
    return [flags, attach.count_hooks(module), _get_current_dispatch_mode(), _get_current_function_mode()]


@pytest.mark.parametrize("name", CASES)
def test_weights(name: str) -> None:
    """Every layer that attends shows what its queries and keys give; no other layer does."""
    case = CASES[name]
    module, catalog, x = prepared(case)
    found = run(module, plan_for(catalog, "*:attention"), x)
    assert list(found) == [f"{layer}:attention" for layer in case.layers]
    for layer in case.layers:
        (info,) = catalog.layers[layer].calls[0].get_boundary("attention").tensors
        weights, _ = case.hand(module.get_submodule(layer), entered(module, layer, x))
        assert weights.std() > 0.01
        torch.testing.assert_close(found[f"{layer}:attention"], weights)
        assert info.shape_for(ROWS) == weights.shape
        assert (info.row_axis, info.crosses_rows, info.layout, info.source) == (0, False, "NAQK", case.how)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """The gradient at every layer's weights is that of the same model with attention written by hand."""
    case = CASES[name]
    module, catalog, x = prepared(case, torch.float64)
    kept: dict[str, Tensor] = {}
    with by_hand(module, case, kept):
        out = module(x.clone().requires_grad_())
    truth = torch.autograd.grad(out.log_softmax(1)[:, 1].neg().sum(), [kept[layer] for layer in case.layers])
    before = same_state(module)
    objective = Objective("cross_entropy", 1)
    found = run(module, plan_for(catalog, "*:attention_grad", "*:attention", ".", objective=objective), x)
    assert same_state(module) == before
    for layer, gradient in zip(case.layers, truth, strict=True):
        assert gradient.abs().max() > 1e-7
        torch.testing.assert_close(found[f"{layer}:attention_grad"], gradient.float(), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(found[f"{layer}:attention"], kept[layer].detach().float())
    torch.testing.assert_close(found["."], out.detach().float())


@pytest.mark.parametrize("name", CASES)
def test_forward_is_untouched(name: str) -> None:
    """Who asks for attention gets everything else bit for bit as who does not, and leaves the model as it was."""
    case = CASES[name]
    module, catalog, x = prepared(case)
    before = same_state(module)
    others = [f"*:{site}" for site in ("output", "input")]
    without = run(module, plan_for(catalog, ".", *others), x)
    having = run(module, plan_for(catalog, ".", *others, "*:attention"), x)
    assert same_state(module) == before
    assert all(torch.equal(having[key], value) for key, value in without.items())
    with torch.inference_mode():
        assert torch.equal(having["."], module(x))


def test_functions_in_a_block() -> None:
    """Two attentions of one call are told apart by number; masks, causality and shared heads are heeded."""
    module = seeded(Functional(), 8).eval()
    catalog = surveyed(module, 5, 8)
    x = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1))
    query, key, _ = (heads_of(part, 4) for part in (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1))
    later = torch.ones(5, 5).triu(1).bool()
    causal = softmax((query @ key.transpose(2, 3) * 0.5).masked_fill(later, -math.inf))
    masked = query @ key[:, [0, 0, 1, 1]].transpose(2, 3) / math.sqrt(2)
    masked[:, :, 2, 1] = -math.inf
    masked = softmax(masked)
    masked[:, :, 0] = 0.0
    found = run(module, plan_for(catalog, ".:attention"), x)
    assert list(found) == [".[0]:attention", ".[1]:attention"]
    torch.testing.assert_close(found[".[0]:attention"], causal.detach())
    torch.testing.assert_close(found[".[1]:attention"], masked.detach())


class Mixer(FoldedAttention):
    """The same in a class whose name says nothing of it."""


@pytest.mark.parametrize("says_heads", [True, False])
def test_three_axes(says_heads: bool) -> None:
    """Weights of three axes are attention where the module says how many heads it has, whatever its class is called."""
    module = seeded(Folded(), 7)
    module.attention = Mixer()
    if not says_heads:
        del module.attention.heads
    owners = {name for name, layer in surveyed(module, 5, 8).layers.items() if layer.has_attention}
    assert owners == ({"attention"} if says_heads else set())


class DotProduct(nn.Module):
    """Attention without parameters, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2))
        return torch.bmm(self.dropout(functional.softmax(scores, dim=-1)), value)


class Projecting(FoldedAttention):
    """Says how many heads there are, and leaves the rest to a part."""

    def __init__(self) -> None:
        super().__init__()
        self.dot = DotProduct()

    def forward(self, x: Tensor) -> Tensor:
        out = self.dot(*(heads_of(part, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1)))
        return out.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def test_folded_in_a_part() -> None:
    """A part without weights has the heads of the module around it: captured, and changed."""
    module = Folded()
    module.attention = Projecting()
    module = seeded(module, 7).eval()
    catalog, x = surveyed(module, 5, 8), torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1))
    assert [name for name, layer in catalog.layers.items() if layer.has_attention] == ["attention.dot"]
    expected, _ = folded(module.attention, x)
    torch.testing.assert_close(run(module, plan_for(catalog, "*:attention"), x)["attention.dot:attention"], expected)
    changed = run(module, planned(catalog, "attention.dot", Operation("zero"), "attention"), x)
    assert not changed["attention"].any()


class TwoProjecting(nn.Module):
    """Two modules of as many heads, or not, with one part that computes for both."""

    def __init__(self, *heads: int) -> None:
        super().__init__()
        self.first, self.second = Projecting(), Projecting()
        self.second.dot = self.first.dot
        self.first.heads, self.second.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean(1)


@pytest.mark.parametrize(("heads", "owners"), [((2, 2), {"first.dot", "second.dot"}), ((2, 4), set()), ((1, 1), set())])
def test_a_part_of_several(heads: tuple[int, int], owners: set[str]) -> None:
    """A part for two modules has their heads if these agree; a single head says nothing of three axes."""
    layers = surveyed(seeded(TwoProjecting(*heads), 7).eval(), 5, 8).layers
    assert {name for name, layer in layers.items() if layer.has_attention} == owners


class GatedDotProduct(nn.Module):
    """Attention of four axes, and a softmax of three that is none."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        out = functional.softmax(query @ key.transpose(2, 3), dim=-1) @ value
        return out.transpose(1, 2).flatten(2) * functional.softmax(gate, dim=-1)


class Gated(nn.Module):
    """Leaves attention to a part that also gates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 32)
        self.dot = GatedDotProduct()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, gate = self.qkv(x).chunk(4, -1)
        return self.dot(heads_of(query, 2), heads_of(key, 2), heads_of(value, 2), gate).mean(1)


def test_a_gate_beside_attention() -> None:
    """What would be attention in a forward of twice as many rows is no attention in one of one row either."""
    assert not any(layer.has_attention for layer in surveyed(seeded(Gated(), 1).eval(), 5, 8).layers.values())


class ThreeQueries(nn.Module):
    """Says that it has two heads, and mixes three things for each row, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).repeat_interleave(3, 0)
        weights = functional.softmax(rows @ rows.transpose(1, 2), dim=-1)
        return (weights @ rows).unflatten(0, (-1, 3)).sum(1)


def test_no_whole_heads() -> None:
    """Three axes whose first does not hold the heads of each row are taken for no attention."""
    layer = surveyed(seeded(ThreeQueries(), 1).eval(), 5, 8).layers["."]
    assert not layer.has_attention


def test_a_change_after_the_last_capture() -> None:
    """A forward that stops within a layer before its attention is computed does not miss the change there."""
    module, catalog, x = prepared(CASES["timm fused"])
    name = "blocks.1.attn.qkv"
    found = run(module, planned(catalog, "blocks.1.attn", Operation("zero"), name), x)
    assert torch.equal(found[name], record(module, x)[name, 0, (), "output"])


def _reduced(selector: Any, **options: Any) -> Any:
    return type(selector)(**{**vars(selector), "reduction": type(selector.reduction)(**options)})


@pytest.mark.parametrize(
    ("name", "text", "says", "hint"),
    [
        ("vit", "conv_proj:attention", "computes no attention", SELF.format(0)),
        ("vit", f"{SELF.format(0)}.out_proj:attention", "never runs", SELF.format(0)),
        ("timm", "blocks.0.attn:attention_sink", "the attention sink of layer 'blocks.0.attn' holds no tensor", ""),
    ],
)
def test_refusals(name: str, text: str, says: str, hint: str) -> None:
    """Who asks for attention where there is none learns where there is."""
    _, catalog, _ = prepared(CASES[name])
    with pytest.raises(RequestError, match=says) as caught:
        plan_for(catalog, text)
    assert hint in caught.value.hint


def test_sinks() -> None:
    """A sink takes what the weights lack, of which their entropy is none; alone, and beside a change of the weights."""
    module, catalog, x = prepared(CASES["sinks"])
    weights, _ = sinking(module.attention, x)
    for texts in (["*:attention_sink"], ["attention:attention", "attention:attention_sink"]):
        found = run(module, plan_for(catalog, *texts), x)
        torch.testing.assert_close(found["attention:attention_sink"], 1 - weights.sum(-1, keepdim=True))
    entry = _reduced(parse_selector("attention:attention"), stats=("entropy",), by="head")
    expected = Categorical(probs=weights).entropy().mean(-1, keepdim=True)
    torch.testing.assert_close(run(module, make_plan([entry], catalog), x)["attention:attention"], expected)
    change = Intervention(parse_selector("attention:attention"), Operation("zero"))
    plan = make_plan(
        [parse_selector(f"attention:{site}") for site in ("attention", "attention_sink")], catalog, [change]
    )
    found = run(module, plan, x)
    assert not found["attention:attention"].any()
    torch.testing.assert_close(found["attention:attention_sink"], 1 - weights.sum(-1, keepdim=True))


def test_unexplained_outputs_are_refused() -> None:
    """Where the weights do not give what the kernel returned nobody gets them."""
    module = seeded(Careless(), 1).eval()
    catalog = surveyed(module, 5, 8)
    before = same_state(module)
    with pytest.raises(InputError, match="differ"):
        run(module, plan_for(catalog, ".:attention"), torch.randn(ROWS, 5, 8))
    assert same_state(module) == before


@pytest.mark.parametrize("site", ["attention", "attention_grad"])
def test_a_forward_left_midway(site: str) -> None:
    """Nothing is left on the model, nor around it, when the forward ends inside attention."""
    case = CASES["timm fused"]
    module, catalog, x = prepared(case)
    before = same_state(module)
    objective = Objective("sum") if site == "attention_grad" else None
    plan = plan_for(catalog, f"blocks.1.attn:{site}", "blocks.1.attn.qkv", objective=objective)
    share = RequestSlice(0, ROWS + 1, plan.captures, (), plan.objective)
    with pytest.raises(InputError, match="qkv"):  # a row fewer than was said
        extract_slices(Modules(module), lambda: module(x), [share], ROWS + 1)
    assert same_state(module) == before
    handle = module.get_submodule("blocks.1.attn.proj").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(module, plan_for(catalog, f"*:{site}", objective=objective), x)
    handle.remove()
    assert same_state(module) == before


def test_gradients_of_attention_run_alone() -> None:
    """Unfused attention is rounded otherwise: no neighbour shares its forward."""
    _, catalog, _ = prepared(CASES["vit"])
    layer = CASES["vit"].layers[0]
    objective = Objective("sum")
    assert not plan_for(catalog, f"{layer}:attention", f"{layer}:grad_input", objective=objective).isolated
    assert plan_for(catalog, f"{layer}:attention_grad", objective=objective).isolated


REPLACEMENT = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(4))  # heads, queries, keys


def halve_queries(weights: Tensor) -> Tensor:
    changed = weights.clone()
    changed[:, :, [3, 0]] *= 0.5
    return changed


def replace_some(weights: Tensor) -> Tensor:
    changed = weights.clone()
    for query, row in zip((1, 3), REPLACEMENT[0], strict=True):
        changed[:, 0, query, [0, 2, 3]] = row
    return changed


OPERATIONS: dict[str, tuple[Callable[[int], Operation], Change]] = {
    "queries": (lambda windows: Operation("scale", by=0.5, queries=(3, 0)), halve_queries),
    "a few weights of one's own": (
        lambda windows: Operation("replace", tensor=own(windows), heads=(0,), queries=(1, 3), keys=(0, 2, 3)),
        replace_some,
    ),
    "all of them": (lambda windows: Operation("clamp", max=0.15), lambda w: w.clamp(max=0.15)),
}


def own(windows: int) -> TensorData:
    """The replacement as a request has it, for each window of a row."""
    values = REPLACEMENT.numpy() if windows == 1 else np.stack([REPLACEMENT.numpy()] * windows)
    return TensorData(values.shape, values.astype("<f4").tobytes())


def planned(
    catalog: Catalog, layer: str, operation: Operation, *texts: str, objective: Objective | None = None
) -> Plan:
    change = Intervention(parse_selector(f"{layer}:attention"), operation)
    return make_plan([parse_selector(text) for text in texts], catalog, [change], objective)


def count_windows(catalog: Catalog, layer: str) -> int:
    (info,) = catalog.layers[layer].calls[0].get_boundary("attention").tensors
    return info.entries_per_row


@pytest.mark.parametrize(("name", "what"), [*product(["timm fused"], OPERATIONS), *product(CASES, ["queries"])])
def test_changes(name: str, what: str) -> None:
    """The forward goes on with the changed weights, a capture there shows them, and the model is left as it was."""
    case, (make, change) = CASES[name], OPERATIONS[what]
    module, catalog, x = prepared(case)
    layer, later = case.layers[:2] if len(case.layers) > 1 else (case.layers[0], case.layers[0])
    kept: dict[str, Tensor] = {}
    with by_hand(module, case, kept, change, layer):
        expected = module(x)
    before = same_state(module)
    operation = make(count_windows(catalog, layer))
    texts = [".", *dict.fromkeys((f"{layer}:attention", f"{later}:attention"))]
    found = run(module, planned(catalog, layer, operation, *texts), x)
    assert same_state(module) == before
    assert (expected - module(x)).abs().max() > 1e-4
    torch.testing.assert_close(found["."], expected, rtol=1e-4, atol=1e-5)
    for each in (layer, later):
        torch.testing.assert_close(found[f"{each}:attention"], kept[each], rtol=1e-4, atol=1e-5)
    (alone,) = run(module, planned(catalog, layer, operation, f"{layer}:attention"), x).values()
    assert torch.equal(alone, found[f"{layer}:attention"])
    assert same_state(module) == before


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_rows_of_others(name: str) -> None:
    """In a forward of several requests only the rows of the one that asked are changed, and none of its numbers."""
    case, (make, _) = CASES[name], OPERATIONS["queries"]
    module, catalog, x = prepared(case)
    layer = case.layers[0]
    plan = planned(catalog, layer, make(1), ".", f"{layer}:attention")
    plain = make_plan([parse_selector("."), parse_selector(f"{layer}:attention")], catalog)
    shares = [
        RequestSlice(0, 1, plain.captures),
        RequestSlice(1, 2, plan.captures, plan.resolved_interventions),
        RequestSlice(2, ROWS, plain.captures),
    ]
    taken = extract_slices(Modules(module), lambda: module(x), shares, ROWS)
    for share, wanted in zip(shares, (plain, plan, plain), strict=True):
        alone = run(module, wanted, x[share.start : share.stop])
        together = taken.select(share)
        for result in wanted.results:
            values = together[result.capture].values
            torch.testing.assert_close(values, alone[result.key], rtol=1e-4, atol=1e-5)
    assert not plain.isolated
    assert plan.isolated
