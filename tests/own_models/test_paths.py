"""Another way through the model: calls are counted, places are found or named, and edits reach whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.own_models import paths_nets as nets
from tests.own_models.ask import Asker, Reply, hook, own, serving_models

LOW, HIGH = torch.randn(8, generator=torch.Generator().manual_seed(1)) - 1, torch.linspace(2.0, 4.0, 8)
NETS = ("Ways", "Loop", "Halting", "Counted", "Kept", "Compiled")


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """One server of all models here."""
    with serving_models(*(own("paths_nets", net) for net in NETS)) as asker:
        yield asker


def make(net: str) -> nn.Module:
    return getattr(nets, net)().eval()  # type: ignore[no-any-return]


def run(model: nn.Module, x: Tensor, **hooks: Any) -> Tensor:
    """The answer of a plain model, with forward hooks on some parts."""
    for name, each in hooks.items():
        part = model.get_submodule(name.replace("_", "."))
        part.register_forward_pre_hook(each, with_kwargs=True) if name == "inner" else part.register_forward_hook(each)
    with torch.no_grad():
        return model(x[None])  # type: ignore[no-any-return]


def zero_first(part: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0


def close(reply: Reply, key: str, right: Tensor) -> None:
    assert reply.status == 200, reply.problem
    torch.testing.assert_close(reply.features[key], right)


# Calls


@pytest.mark.parametrize("net", ["Loop", "Halting", "Counted"])
def test_every_forward_counts_its_calls(asker: Asker, net: str) -> None:
    """The last call is this forward's last, and all calls are all that it makes, for inputs one by one."""
    part = "block" if net == "Loop" else "cell"
    for x in (LOW, HIGH, LOW * 100, HIGH / 1000):
        calls = hook(make(net), part, x)
        reply = asker.extract(net, [x], [".", part, {"layer": f"{part}#*", "as": "all"}])
        close(reply, ".", run(make(net), x))
        close(reply, part, calls[-1])
        keys = [f"all#{number}" for number in range(len(calls))] if len(calls) > 1 else ["all"]
        assert set(reply.features) == {".", part, *keys}
        for key, right in zip(keys, calls, strict=True):
            close(reply, key, right)
        receipt = reply.body["features"][part]
        assert receipt.get("call", len(calls) - 1) == len(calls) - 1


def test_calls_by_number(asker: Asker) -> None:
    """A call that this forward makes is there under its key, though the survey's forward made fewer; others are not."""
    calls = hook(make("Loop"), "block", HIGH)
    for text, right in (("block#4", calls[4]), ("block#2", calls[2]), ("block#-5", calls[0]), ("block#-3", calls[2])):
        close(asker.extract("Loop", [HIGH], [text]), text, right)
    both = asker.extract("Loop", [HIGH], ["block#3", "block#*"])
    assert list(both.features) == ["block#3", *(f"block#{number}" for number in (0, 1, 2, 4))]
    zeroed = asker.extract("Loop", [HIGH], ["."], interventions=[{"layer": "block#3", "op": "zero"}])
    turns = iter(range(5))
    right = run(make("Loop"), HIGH, block=lambda part, args, output: output * 0 if next(turns) == 3 else None)
    close(zeroed, ".", right)
    for x, text, runs in ((LOW, "block#4", 2), (HIGH, "block#5", 5), (HIGH, "block#2000", 2)):
        reply = asker.extract("Loop", [x], [text])
        assert reply.status == 422
        assert f"layer 'block' runs {runs} times" in reply.problem


def test_inputs_of_one_request_go_their_own_ways(asker: Asker) -> None:
    """Inputs whose forwards make two and five calls share the last one's array; the others are given by input."""
    reply = asker.extract("Loop", [LOW, HIGH, LOW], ["block", "block.0#*", "."])
    found = [hook(make("Loop"), "block.0", x) for x in (LOW, HIGH, LOW)]
    close(reply, "block", torch.cat([hook(make("Loop"), "block", x)[-1] for x in (LOW, HIGH, LOW)]))
    close(reply, "block.0#1", torch.cat([calls[1] for calls in found]))
    close(reply, "block.0#4.input1", found[1][4])
    assert "block.0#2.input0" not in reply.features
    close(reply, ".", torch.cat([run(make("Loop"), x) for x in (LOW, HIGH, LOW)]))


def test_calls_of_functions(asker: Asker) -> None:
    """Functions of a loop are counted too."""
    reply = asker.extract("Loop", [HIGH], ["./relu#*"])
    calls = [torch.relu(each) for each in hook(make("Loop"), "block", HIGH)]
    assert list(reply.features) == [f"./relu#{number}" for number in range(5)], reply.problem
    for key, right in zip(reply.features, calls, strict=True):
        close(reply, key, right)


def test_changed_loops(asker: Asker) -> None:
    """A change without a call is made at every call, one at the last at this forward's last; the reply lists them."""
    change = {"layer": "block", "op": "replace", "value": -1}
    reply = asker.extract("Loop", [HIGH], ["."], interventions=[change])
    close(reply, ".", run(make("Loop"), HIGH, block=lambda part, args, output: torch.zeros_like(output) - 1))
    assert reply.body["interventions"] == [[f"block#{number}:output" for number in range(5)]]
    turns = iter(range(5))
    right = run(make("Loop"), HIGH, block=lambda part, args, output: output * 0 if next(turns) == 4 else None)
    reply = asker.extract("Loop", [HIGH], ["."], interventions=[{"layer": "block#-1", "op": "zero"}])
    close(reply, ".", right)
    assert reply.body["interventions"] == [["block#4:output"]]


def test_gradients_of_loops(asker: Asker) -> None:
    """The gradient at a part that runs in a loop is that of this forward's last call."""
    reply = asker.extract("Loop", [HIGH], ["block:grad_output"], objective={"kind": "logit", "class": 1})
    model, outputs = make("Loop"), list[Tensor]()
    model.block.register_forward_hook(lambda part, args, output: outputs.append(output))  # type: ignore[union-attr]
    (right,) = torch.autograd.grad(model(HIGH[None])[0, 1], outputs[-1:])
    close(reply, "block:grad_output", right)


def test_edits_that_are_not_made(asker: Asker) -> None:
    """A change of a part that does not run for an input is an error that names it; one behind all results is none."""
    reply = asker.extract("Ways", [HIGH], ["."], interventions=[{"layer": "extra", "op": "zero"}])
    assert reply.status >= 400
    assert "extra" in reply.problem
    assert asker.extract("Ways", [HIGH], ["extra"]).status >= 400
    close(asker.extract("Ways", [LOW], ["extra"]), "extra", hook(make("Ways"), "extra", LOW)[0])
    reply = asker.extract("Compiled", [LOW], ["a"], interventions=[{"layer": "b", "op": "zero"}])
    close(reply, "a", hook(make("Compiled"), "a", LOW)[0])
    assert reply.body["interventions"] == [[]]
    assert any("'b#0:output'" in warning for warning in reply.body["warnings"])


# Structures


@pytest.mark.parametrize("x", [LOW, HIGH])
@pytest.mark.parametrize(
    ("layer", "hooks"),
    [
        (
            "inner:input",
            {
                "inner": lambda part, args, kwargs: (
                    (args, kwargs | {"x": torch.zeros(1, 8)}) if kwargs else ((torch.zeros(1, 8),), {})
                )
            },
        ),
        ("pair", {"pair": zero_first}),
    ],
)
def test_places_that_move(asker: Asker, x: Tensor, layer: str, hooks: dict[str, Callable[..., Any]]) -> None:
    """An argument is found however it is passed, beside others or alone; a tensor too that comes with another."""
    reply = asker.extract("Ways", [x], ["."], interventions=[{"layer": layer, "op": "zero"}])
    close(reply, ".", run(make("Ways"), x, **hooks))


def test_argument_by_name(asker: Asker) -> None:
    """What is given for an argument is the argument of that name, for inputs of both ways."""
    for x in (LOW, HIGH):
        close(asker.extract("Ways", [x], ["inner:input"]), "inner:input", x[None])


@pytest.mark.parametrize("layer", ["keyed", "named", "named[values]", "listed", "pair"])
def test_structures_that_change(asker: Asker, layer: str) -> None:
    """Tensors under another name, or more of them than are known, are no answer: the error names the place."""
    assert asker.extract("Ways", [LOW], [layer]).status == 200
    reply = asker.extract("Ways", [HIGH], [layer])
    assert reply.status >= 400
    assert layer.partition("[")[0] in reply.problem
    reply = asker.extract("Ways", [HIGH], ["."], interventions=[{"layer": layer, "op": "zero"}])
    assert layer in ("listed", "pair") or (reply.status >= 400 and layer.partition("[")[0] in reply.problem)


# Readers of what is kept


@pytest.mark.parametrize("part", ["itself", "listed", "hooked", "shared", "drop", "."])
def test_kept_outputs(asker: Asker, part: str) -> None:
    """A changed output is what later parts read, whether a part keeps it, a list or a hook of the model's own."""
    reply = asker.extract("Kept", [LOW], ["."], interventions=[{"layer": part, "op": "zero"}])
    plain = run(make("Kept"), LOW)[0]
    rows = {"itself": [3], "listed": [4], "hooked": [5], "shared": [7], "drop": [2], ".": [*range(9)]}[part]
    assert reply.status == 200, reply.problem
    found = reply.features["."][0]
    assert (found[rows] == 0).all()
    assert torch.equal(found[6] == 0, plain[6] == 0) or part == "."  # kept before: not this part's
    close(asker.extract("Kept", [LOW], ["."]), ".", plain[None])


@pytest.mark.parametrize("part", ["itself", "listed", "hooked", "shared"])
def test_gradients_through_what_is_kept(asker: Asker, part: str) -> None:
    """The gradient at a part counts those who read its output from where it is kept."""
    objective = {"kind": "sum", "layer": "."}
    reply = asker.extract("Kept", [LOW], [f"{part}:grad_output"], objective=objective)
    model, found = make("Kept"), list[Tensor]()
    model.get_submodule(part).register_forward_hook(lambda part, args, output: found.append(output))
    (right,) = torch.autograd.grad(model(LOW[None]).sum(), found)
    close(reply, f"{part}:grad_output", right)


def test_verified_where_changes_arrive(asker: Asker) -> None:
    """An answer counts as verified only where what is put in its place reaches all who read it."""
    for part in ("itself", "listed", "hooked", "shared"):
        assert asker.extract("Kept", [LOW], [part], verify=True).body.get("verified") is True
    reply = asker.extract("Kept", [LOW], ["classed"], verify=True)
    assert reply.status >= 400
    assert "not verified" in reply.problem


# Compiled functions


def test_compiled_functions_run_as_written(asker: Asker) -> None:
    """Parts that a compiled function or an unregistered compiled module calls are seen and changed."""
    for _ in range(2):
        close(asker.extract("Compiled", [LOW], ["a"]), "a", hook(make("Compiled"), "a", LOW)[0])
    model = make("Compiled")
    with torch.no_grad():
        right = model.b(torch.zeros(1, 8))  # type: ignore[operator]
    reply = asker.extract("Compiled", [LOW], [".", "b"], interventions=[{"layer": "a", "op": "zero"}])
    close(reply, ".", right)
    close(reply, "b", right)
