"""All that ``torchvision.models.feature_extraction`` names in a model can be had by a selector, with its values."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torchvision.models import feature_extraction, get_model
from torchvision.models.feature_extraction import NodePathTracer, create_feature_extractor, get_graph_node_names

from layertap.models.catalog.survey import survey
from layertap.models.hooks.attach import Modules
from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.spec import InputSpec
from tests.models.extraction import extract_captures
from tests.oracle import seeded

SIZES = {"resnet18": 64, "googlenet": 64, "shufflenet_v2_x0_5": 64, "swin_t": 64, "vit_b_32": 64}
# Python functions of torchvision that its graphs show whole: where what they return is to be had in their layer.
WHOLE = {
    "stochastic_depth": "{}",
    "shifted_window_attention": "{}",
    "_get_relative_position_bias": "{}/unsqueeze#0",
    "_patch_merging_pad": "{}/cat#0",
}
OPTIONS: dict[str, dict[str, Any]] = {"googlenet": {"init_weights": False}, "vit_b_32": {"image_size": 64}}
LEVELS = {"resnet18": (), "shufflenet_v2_x0_5": pytest.mark.slow, "swin_t": pytest.mark.slow}
NEVER_OVERWRITTEN = {"swin_t", "vit_b_32"}  # in the others torchvision's own extractor is wrong
NAMES = {"iadd": "add", "imul": "mul", "isub": "sub", "truediv": "div"}  # operators by torch's names


class Recorder(fx.Interpreter):
    """Runs a graph as it is written, and keeps what each node gives as it is then."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """What the node gives."""
        value = super().run_node(n)
        self.values[n] = value.clone() if isinstance(value, Tensor) else value
        return value


def name_selectors(names: dict[fx.Node, str], values: dict[fx.Node, Any]) -> dict[fx.Node, str]:
    """The selector of each node that gives a tensor and is no weight, and of those that give several."""
    calls = Counter[str]()
    selectors: dict[fx.Node, str] = {}
    for node, value in values.items():
        if node.op in ("get_attr", "output") or not has_tensor(value):
            continue
        layer = names[node].rpartition(".")[0] or "."
        function = node.target if isinstance(node.target, str) else node.target.__name__
        source = node.args[0] if node.args else None
        if node.op == "placeholder":
            selectors[node] = ".:input"
        elif function in WHOLE:
            selectors[node] = WHOLE[function].format(layer)
        elif node.target is operator.getitem and isinstance(source, fx.Node) and isinstance(values[source], tuple):
            selectors[node] = f"{selectors[source]}[{node.args[1]}]"
        else:
            place = function if node.op == "call_module" else f"{layer}/{NAMES.get(function, function).strip('_')}"
            selectors[node] = f"{place}#{calls[place]}"
            calls[place] += 1
    return selectors


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple with one."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(has_tensor, value)))


def extract(module: nn.Module, selectors: Iterable[str], image: Tensor) -> dict[str, Tensor]:
    """What selectors give of one forward."""
    specs, cpu = (InputSpec("x", tuple(image.shape[1:])),), torch.device("cpu")
    catalog = survey(module, specs, lambda rows: module(*rows.values()), cpu, 0, torch.float32, functions=True)
    plan = make_plan([parse_selector(text) for text in selectors], catalog)
    results = extract_captures(Modules(module), lambda: module(image.clone()), plan.captures, len(image))
    return {result.key: results[result.capture].values for result in plan.results}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LEVELS.get(name, pytest.mark.hard)) for name in SIZES])
def test_every_node(name: str) -> None:
    """Each value of the graph as it was computed; torchvision's own is another where something wrote to it later."""
    module = seeded(get_model(name, weights=None, **OPTIONS.get(name, {})), 1).eval()
    image = torch.randn(2, 3, SIZES[name], SIZES[name], generator=torch.Generator().manual_seed(2))
    tracer = NodePathTracer(**feature_extraction._set_default_tracer_kwargs(None))
    recorder = Recorder(fx.GraphModule(module, tracer.trace(module)))
    with torch.no_grad():
        recorder.run(image.clone())
        listed = get_graph_node_names(module, suppress_diff_warning=True)[1]
        theirs = create_feature_extractor(module, listed, suppress_diff_warning=True)(image.clone())
    names: dict[fx.Node, str] = tracer.node_to_qualname
    assert list(names.values()) == listed
    selectors = name_selectors(names, recorder.values)
    tensors = {
        node: value
        for node, value in recorder.values.items()
        if node in names and isinstance(value, Tensor) and node.op != "get_attr"  # a weight
    }
    ours = extract(module, dict.fromkeys(selectors[node] for node in tensors), image)
    for node, value in tensors.items():
        assert torch.equal(ours[selectors[node]], value), names[node]
    overwritten = {names[node] for node, value in tensors.items() if not torch.equal(theirs[names[node]], value)}
    assert bool(overwritten) != (name in NEVER_OVERWRITTEN), overwritten
    assert any("/" in text for text in selectors.values())
