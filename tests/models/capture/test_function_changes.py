"""Functions inside a forward as layers: changed, differentiated and differentiated by, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.hooks.attach import count_hooks
from layertap.models.inputs.noise import make_noise
from layertap.models.planner import make_plan
from layertap.models.resume.prover import verify_resumable
from layertap.models.resume.resumption import Resumption, find_start
from layertap.models.selection.hook_points import Intervention, Objective, Operation, TensorData
from layertap.models.selection.plan import Plan
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from tests.function_nets import InPlace, count_modes
from tests.models.capture.test_functions import survey_functions
from tests.oracle import seeded

Edit = Callable[[str, Tensor], Tensor]
Ask = tuple[str, Operation]


def plan(
    catalog: Catalog, layers: Sequence[str], changes: Sequence[Ask] = (), objective: Objective | None = None
) -> Plan:
    made = [Intervention(parse_selector(layer), operation) for layer, operation in changes]
    return make_plan([parse_selector(each) for each in layers], catalog, made, objective)


def extract(module: nn.Module, inputs: Mapping[str, Tensor], *plans: Plan) -> list[dict[str, Tensor]]:
    """What plans give of one forward that they share, each for as many rows."""
    count = len(next(iter(inputs.values())))
    size = count // len(plans)
    slices = [
        RequestSlice(k * size, (k + 1) * size, each.captures, each.resolved_interventions, each.objective)
        for k, each in enumerate(plans)
    ]
    rows = {name: value.clone() for name, value in inputs.items()}
    found = FeatureExtractor(module).extract_slices(lambda: module(**rows), slices, count)
    assert (count_hooks(module), count_modes()) == (0, 0)
    results = [found.select(each) for each in slices]
    return [
        {result.key: each[result.capture].values.detach() for result in of.results}
        for each, of in zip(results, plans, strict=True)
    ]


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def in_place() -> InPlace:
    return seeded(InPlace(), 2).eval().requires_grad_(False)


NAMES = ("add#0:input", "add#0", "relu#0", "mul#0", "relu#1:input", "relu#1", "relu#2", "add#1")


@pytest.mark.parametrize("name", NAMES)
def test_values_are_changed(in_place: InPlace, name: str) -> None:
    """Whoever has a tensor that a function wrote to has the change; other requests' rows have none."""
    x = rows()
    catalog = survey_functions(in_place)
    change = (f"./{name}", Operation("scale", by=-1.5, channels=(1, 4)))

    def edit(at: str, value: Tensor) -> Tensor:
        factor = torch.ones(6)
        factor[[1, 4]] = -1.5 if at == name else 1
        return value * factor

    found, other = extract(in_place, {"x": x}, plan(catalog, [".", f"./{name}"], [change]), plan(catalog, ["."]))
    torch.testing.assert_close(found["."], in_place.compute(x[:2], edit))
    assert not torch.allclose(found["."], in_place(x[:2].clone()), atol=1e-3)
    seen: dict[str, Tensor] = {}
    in_place.compute(x[:2], lambda at, value: seen.setdefault(at, edit(at, value)))
    torch.testing.assert_close(found[f"./{name}"], seen[name])
    (alone,) = extract(in_place, {"x": x}, plan(catalog, ["."]))
    assert torch.equal(other["."], alone["."][2:])


@pytest.mark.parametrize("name", [each for each in NAMES if each != "mul#0"])
def test_gradients(in_place: InPlace, name: str) -> None:
    """Gradients at a function, by an objective of the model or of a function, and what a change of them makes."""
    x = rows()
    catalog = survey_functions(in_place)
    site = name.replace(":input", "") + (":grad_input" if name.endswith(":input") else ":grad_output")
    clamp = (f"./{site}", Operation("clamp", min=0.0))
    for objective, end in ((Objective("sum"), "."), (Objective("layer", selector=parse_selector("./add#1")), "add#1")):
        for changes in ([], [clamp]):
            kept: dict[str, Tensor] = {}
            given = x.clone().requires_grad_()

            def edit(at: str, value: Tensor, kept: dict[str, Tensor] = kept, changes: list[Ask] = changes) -> Tensor:
                value = value.clone()
                if at == name:
                    if changes:
                        value.register_hook(lambda gradient: gradient.clamp(min=0))
                    value.retain_grad()
                kept[at] = value
                return value.clone()

            kept["."] = in_place.compute(given, edit)
            total = kept["."].sum() if end == "." else kept[end].mean(1).sum()
            total.backward()
            wanted = kept[name].grad
            assert wanted is not None
            (found,) = extract(
                in_place, {"x": x}, plan(catalog, [f"./{site}", ".:grad_input", "."], changes, objective)
            )
            torch.testing.assert_close(found[f"./{site}"], wanted)
            torch.testing.assert_close(found[".:grad_input"], given.grad)
            torch.testing.assert_close(found["."], kept["."].detach())


@pytest.fixture(scope="module")
def gpt2() -> tuple[GPT2LMHeadModel, Catalog]:
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(7)
    module = GPT2LMHeadModel(config).eval().requires_grad_(False)
    specs = (InputSpec("input_ids", (6,), "int64", values=(0, 40)),)
    catalog = survey(module, specs, lambda each: module(**each), torch.device("cpu"), 0, torch.float32, functions=True)
    return module, catalog


def run_residual_stream(module: GPT2LMHeadModel, ids: Tensor, edit: Edit) -> Tensor:
    """GPT-2 as its paper has it, by hand; ``edit`` is at the residual stream behind each block's attention."""
    trunk = module.transformer
    x = trunk.wte(ids) + trunk.wpe(torch.arange(ids.shape[1]))
    for number, block in enumerate(trunk.h):
        heads = [
            part.unflatten(2, (2, -1)).transpose(1, 2) for part in block.attn.c_attn(block.ln_1(x)).split(16, dim=2)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = edit(f"h.{number}", x + block.attn.c_proj(mixed.transpose(1, 2).flatten(2)))
        x = x + block.mlp(block.ln_2(x))
    return module.lm_head(trunk.ln_f(x))


def test_the_residual_stream(gpt2: tuple[GPT2LMHeadModel, Catalog]) -> None:
    """A change behind the attention of a block is one of the residual stream; that of what ``ln_2`` takes is not."""
    module, catalog = gpt2
    ids = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    vector = torch.randn(16, generator=torch.Generator().manual_seed(2))
    tensor = TensorData((16,), vector.numpy().astype("<f4").tobytes())
    point = "transformer.h.1/add#0"
    steer = Operation("add", tensor=tensor, tokens=(2, -1))

    def edit(at: str, value: Tensor) -> Tensor:
        mask = torch.zeros(6, 1)
        mask[[2, -1]] = 1 if at == "h.1" else 0
        return value + mask * vector

    made = plan(catalog, [".[logits]"], [(point, steer)])
    (found,) = extract(module, {"input_ids": ids}, made)
    torch.testing.assert_close(found[".[logits]"], run_residual_stream(module, ids, edit))
    assert made.warnings == ()

    made = plan(catalog, [".[logits]"], [("transformer.h.1.ln_2:input", steer)])
    (of_input,) = extract(module, {"input_ids": ids}, made)
    assert not torch.allclose(of_input[".[logits]"], found[".[logits]"], atol=1e-2)
    assert made.warnings == (
        "others read these inputs too, without the change: 'transformer.h.1.ln_2:input' (for all of them change "
        "'transformer.h.1/add#0')",
    )
    for alone in ("transformer.h.1:input", "transformer.h.1.mlp:input", "lm_head:input", "transformer.drop:input"):
        assert plan(catalog, [".[logits]"], [(f"{alone}", Operation("scale", by=2.0))]).warnings == (), alone


class Views(nn.Module):
    """Writes to a tensor through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.view(-1, 4).add_(1)
        return y


@pytest.mark.parametrize("at", ["view#0", "view#0:input", "view#0:grad_output", "mul#0"])
def test_views(at: str) -> None:
    """Where a function returns a view, whoever changes or differentiates it cuts all rows off it: it runs alone."""
    catalog = survey_functions(Views())
    if "grad" in at:
        wanted = plan(catalog, [f"./{at}"], objective=Objective("sum"))
    else:
        wanted = plan(catalog, ["."], [(f"./{at}", Operation("zero"))])
    assert wanted.may_share == (at == "mul#0")


def resume(module: nn.Module, catalog: Catalog, text: str, specs: tuple[InputSpec, ...]) -> Resumption:
    """Forwards that go on from what a function returns."""
    batch = make_noise(specs, torch.device("cpu"), torch.float32)
    start = find_start(parse_selector(text), catalog)
    return verify_resumable(module, start, catalog, specs, lambda rows, part: part(**rows), batch, torch.float32)


def list_outputs(known: Resumption) -> set[str]:
    return {name for name, layer in known.catalog.layers.items() if any(call.output.tensors for call in layer.calls)}


def test_resuming_from_the_residual_stream(gpt2: tuple[GPT2LMHeadModel, Catalog]) -> None:
    """A forward goes on from a sum of a block; what comes before it is not offered."""
    module, catalog = gpt2
    specs = (InputSpec("input_ids", (6,), "int64", values=(0, 40)),)
    known = resume(module, catalog, "transformer.h.1/add#0", specs)
    sent = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
    ids = torch.zeros(2, 6, dtype=torch.int64)
    with torch.no_grad():
        output = known.forward(lambda rows, part: part(**rows), module, sent.clone())
        wanted = run_residual_stream(module, ids, lambda at, value: sent if at == "h.1" else value)
    torch.testing.assert_close(output["logits"], wanted)
    outputs = list_outputs(known)
    assert {"transformer.h.1.ln_2", "transformer.h.1", "transformer.h.2.ln_1", "lm_head", "."} <= outputs
    assert not {"transformer.wte", "transformer.h.0", "transformer.h.1.ln_1", "transformer.h.1.attn"} & outputs
    assert known.catalog.start == "transformer.h.1/add#0"
    assert count_hooks(module) == 0
