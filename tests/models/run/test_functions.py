"""Functions inside a forward: what they take and return, changed and differentiated, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.errors import LayerNotReachedError, RequestError
from layertap.models.hooks.attach import Modules, count_hooks
from layertap.models.hooks.functions import get_function_name
from layertap.models.inputs.noise import make_noise
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation, Selector, TensorData
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.run.resumption import Resumption, find_start, verify_resumable
from layertap.models.spec import InputSpec
from tests.function_nets import Branches, InPlace, Outer, count_modes, mix
from tests.models.extraction import extract_captures
from tests.oracle import seeded


def survey_functions(module: nn.Module, *, functions: bool = True) -> Catalog:
    specs, cpu = (InputSpec("x", (4,)),), torch.device("cpu")
    return survey(module, specs, lambda rows: module(*rows.values()), cpu, 0, torch.float32, functions=functions)


def extract(module: nn.Module, selectors: Iterable[str | Selector], x: Tensor) -> dict[str, Tensor]:
    """What selectors give of one forward."""
    parsed = [parse_selector(each) if isinstance(each, str) else each for each in selectors]
    plan = make_plan(parsed, survey_functions(module))
    results = extract_captures(Modules(module), lambda: module(x.clone()), plan.captures, len(x))
    assert (count_hooks(module), count_modes()) == (0, 0)
    return {result.key: results[result.capture].values for result in plan.results}


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def outer() -> Outer:
    return seeded(Outer(), 1).eval()


@pytest.mark.parametrize("together", [True, False])
def test_values(outer: Outer, together: bool) -> None:
    """Each is what it was then, whatever was written to it later; also where the forward ends there."""
    x = rows()
    expected = mix(outer.mixer, x - 1)
    asked = [list(expected)] if together else [[text] for text in expected]
    found = {key: value for texts in asked for key, value in extract(outer, texts, x).items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


KEYS = {
    "mixer/mul#*": ("mixer/mul#0", "mixer/mul#1"),
    "mixer#0/mul": ("mixer#0/mul#0", "mixer#0/mul#1"),
    "*/add#0": ("mixer/add#0", "mixer.halves#1/add#0"),
    "mixer.*#*/add": ("mixer.halves#0/add#0", "mixer.halves#1/add#0"),
    "mixer/split": ("mixer/split#0[0]", "mixer/split#0[1]"),
}


@pytest.mark.parametrize("text", KEYS)
def test_names(text: str) -> None:
    """Several of a name, or of a layer, have canonical keys, in the order in which they are called."""
    assert tuple(outer_keys(text)) == KEYS[text]


def test_aliases() -> None:
    """An alias stands for a lone function, and before the names of several."""
    assert outer_keys("mixer/add#0", alias="a") == ["a"]
    assert outer_keys("mixer/mul", alias="a") == ["a/mul#0", "a/mul#1"]
    assert outer_keys("*/add:input", path=("1",)) == ["mixer/add#1[1]:input", "mixer.halves#1/add#0[1]:input"]


def outer_keys(text: str, alias: str | None = None, path: tuple[str, ...] | None = None) -> list[str]:
    selector = parse_selector(text)
    parts = {"alias": alias} | ({"path": path} if path else {})
    return [result.key for result in make_plan([Selector(**vars(selector) | parts)], survey_functions(Outer())).results]


def test_numbers_that_depend_on_the_input() -> None:
    """A forward that calls fewer of a name than its survey is told; those that depend on the batch are not offered."""
    module = Branches()
    assert not survey_functions(module).layers["."].calls[0].functions

    class ByRow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1 if bool(x.amax() < 100) else x * 2

    plan = make_plan([parse_selector("./add#0")], survey_functions(ByRow()))
    modules = Modules(ByRow())
    with pytest.raises(LayerNotReachedError, match=r"never reached"):
        extract_captures(modules, lambda: ByRow()(torch.full((1, 4), 200.0)), plan.captures, 1)


def test_a_forward_that_raises_leaves_nothing(outer: Outer) -> None:
    """However a forward ends, no mode is on and no hook is left."""
    plan = make_plan([parse_selector("mixer/add#1"), parse_selector("mixer.halves/add")], survey_functions(outer))
    modules = Modules(outer)

    def forward() -> object:
        return outer(torch.ones(2, 5))

    with pytest.raises(RuntimeError):
        extract_captures(modules, forward, plan.captures, 2)
    assert (count_hooks(outer), count_modes()) == (0, 0)


REFUSED = {
    "mixer/mul#2": ("calls no such function", "functions here: add#0, relu#0, mul#0, split#0, cat#0, mul#1"),
    "mixer/add#x": ("is no call number", "write '#0'"),
    "mixer/__class__": ("calls no such function", "functions here"),
    "mixer/split#0[2]": ("the output of 'mixer/split#0' has nothing at '[2]'", "paths here: [0], [1]"),
    "mixer/add#0[0]": ("the output of 'mixer/add#0' is a single tensor", "leave the path out"),
    "mixer.first/linear": ("calls no functions itself", "?functions=true"),
    "mixer/add#0:grad_output": ("needs an objective", "objective"),
    "mixer/add#0:attention": ("the site 'attention' is one of layers", "use 'output' or 'input' or 'grad_output'"),
    "mixer/*": ("matches no layer", "name the function, 'mixer/add'"),
    "mixer#1/add#0": ("runs once in a forward", "use #0"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    """What is wrong, and what to write instead."""
    with pytest.raises(RequestError) as caught:
        make_plan([parse_selector(text)], survey_functions(Outer()))
    fault = (caught.value.faults or (caught.value.to_fault("/"),))[0]
    assert REFUSED[text][0] in fault.detail
    assert REFUSED[text][1] in (fault.hint or "")


def test_names_of_functions() -> None:
    """A function, its method, its operator, reflected and in place, have the name that the function has."""
    x, names = torch.ones(2), list[str | None]()

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(get_function_name(func))
            return func(*args, **(kwargs or {}))

    with Names():
        y = 1 + x
        y += x
        y.add_(x + y.add(x) + torch.add(x, x))
        assert {*names} == {"add"}
        names.clear()
        (1 & x.int(), 1 / x / torch.div(x, x), (1 - x) - torch.rsub(x, 1), 7 // x % 2, x[0], torch.rand(2) @ x, x.shape)
    assert {*names} == {
        *("int", "bitwise_and", "div", "sub", "floor_divide", "remainder", "getitem", "rand", "matmul", None)
    }


Edit = Callable[[str, Tensor], Tensor]
Ask = tuple[str, Operation]


def planned(
    catalog: Catalog, layers: Sequence[str], changes: Sequence[Ask] = (), objective: Objective | None = None
) -> Plan:
    made = [Intervention(parse_selector(layer), operation) for layer, operation in changes]
    return make_plan([parse_selector(each) for each in layers], catalog, made, objective)


def extract_all(module: nn.Module, inputs: Mapping[str, Tensor], *plans: Plan) -> list[dict[str, Tensor]]:
    """What plans give of one forward that they share, each for as many rows."""
    count = len(next(iter(inputs.values())))
    size = count // len(plans)
    slices = [
        RequestSlice(k * size, (k + 1) * size, each.captures, each.resolved_interventions, each.objective)
        for k, each in enumerate(plans)
    ]
    rows = {name: value.clone() for name, value in inputs.items()}
    found = extract_slices(Modules(module), lambda: module(**rows), slices, count)
    assert (count_hooks(module), count_modes()) == (0, 0)
    results = [found.select(each) for each in slices]
    return [
        {result.key: each[result.capture].values.detach() for result in of.results}
        for each, of in zip(results, plans, strict=True)
    ]


@pytest.fixture
def in_place() -> InPlace:
    return seeded(InPlace(), 2).eval().requires_grad_(False)


NAMES = ("add#0:input", "add#0", "relu#0", "mul#0", "relu#1:input", "relu#1", "relu#2", "add#1")


@pytest.mark.parametrize("name", NAMES)
def test_values_are_changed(in_place: InPlace, name: str) -> None:
    """Whoever has a tensor that a function wrote to has the change; other requests' rows have none."""
    x = rows(4)
    catalog = survey_functions(in_place)
    change = (f"./{name}", Operation("scale", by=-1.5, channels=(1, 4)))

    def edit(at: str, value: Tensor) -> Tensor:
        factor = torch.ones(6)
        factor[[1, 4]] = -1.5 if at == name else 1
        return value * factor

    found, other = extract_all(
        in_place, {"x": x}, planned(catalog, [".", f"./{name}"], [change]), planned(catalog, ["."])
    )
    torch.testing.assert_close(found["."], in_place.compute(x[:2], edit))
    assert not torch.allclose(found["."], in_place(x[:2].clone()), atol=1e-3)
    seen: dict[str, Tensor] = {}
    in_place.compute(x[:2], lambda at, value: seen.setdefault(at, edit(at, value)))
    torch.testing.assert_close(found[f"./{name}"], seen[name])
    (alone,) = extract_all(in_place, {"x": x}, planned(catalog, ["."]))
    assert torch.equal(other["."], alone["."][2:])


@pytest.mark.parametrize("name", [each for each in NAMES if each != "mul#0"])
def test_gradients_at_functions(in_place: InPlace, name: str) -> None:
    """Gradients at a function, by an objective of the model or of a function, and what a change of them makes."""
    x = rows(4)
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
            (found,) = extract_all(
                in_place, {"x": x}, planned(catalog, [f"./{site}", ".:grad_input", "."], changes, objective)
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

    made = planned(catalog, [".[logits]"], [(point, steer)])
    (found,) = extract_all(module, {"input_ids": ids}, made)
    torch.testing.assert_close(found[".[logits]"], run_residual_stream(module, ids, edit))
    assert made.warnings == ()

    made = planned(catalog, [".[logits]"], [("transformer.h.1.ln_2:input", steer)])
    (of_input,) = extract_all(module, {"input_ids": ids}, made)
    assert not torch.allclose(of_input[".[logits]"], found[".[logits]"], atol=1e-2)
    assert made.warnings == (
        "others read these inputs too, without the change: 'transformer.h.1.ln_2:input' (for all of them change "
        "'transformer.h.1/add#0')",
    )
    for alone in ("transformer.h.1:input", "transformer.h.1.mlp:input", "lm_head:input", "transformer.drop:input"):
        assert planned(catalog, [".[logits]"], [(f"{alone}", Operation("scale", by=2.0))]).warnings == (), alone


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
        wanted = planned(catalog, [f"./{at}"], objective=Objective("sum"))
    else:
        wanted = planned(catalog, ["."], [(f"./{at}", Operation("zero"))])
    assert wanted.isolated == (at != "mul#0")


def resume(module: nn.Module, catalog: Catalog, text: str, specs: tuple[InputSpec, ...]) -> Resumption:
    """Forwards that go on from what a function returns."""
    batch = make_noise(specs, torch.device("cpu"), torch.float32)
    start = find_start(parse_selector(text), catalog)
    return verify_resumable(module, start, catalog, specs, lambda rows: module(**rows), batch, torch.float32)


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
        output = known.forward(lambda rows: module(**rows), Modules(module), sent.clone())
        wanted = run_residual_stream(module, ids, lambda at, value: sent if at == "h.1" else value)
    torch.testing.assert_close(output["logits"], wanted)
    outputs = list_outputs(known)
    assert {"transformer.h.1.ln_2", "transformer.h.1", "transformer.h.2.ln_1", "lm_head", "."} <= outputs
    assert not {"transformer.wte", "transformer.h.0", "transformer.h.1.ln_1", "transformer.h.1.attn"} & outputs
    assert known.catalog.start == "transformer.h.1/add#0"
    assert count_hooks(module) == 0
