"""Texts that models of transformers continue, against ``generate`` of that library and plain hooks while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from layertap.models.run.model_info import MAX_GENERATIONS
from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import POSITIONS, VOCABULARY, saved, tokenizer

STEPS, SEED = 7, 3  # of nets that generate different tokens
CHAT = "{% for each in messages %}{{ each.role }} {{ each.content }} {% endfor %}{{ 'red' if add_generation_prompt }}"
NETS = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "sliding": "model.layers.1"}  # with a layer of each
PROMPTS = ([5, 7, 8, 6, 9], [4, 11])
Edit = Callable[[int, Tensor], Tensor]  # of a call's number and output


@dataclass(frozen=True)
class Writers:
    """A server of models that generate, the same models offline, and their folder."""

    live: Live
    modules: Mapping[str, Any]
    folder: Path

    def post(self, model: str, *inputs: Json, generate: Json | None = None, **fields: Any) -> Any:
        body = {"model": model, "inputs": list(inputs), "generate": generate or {"steps": STEPS, "stop": []}, **fields}
        return self.live.client.post("/extract", json=body, params={"format": "npz"} if "layers" in fields else {})


@pytest.fixture(scope="module")
def writers(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    folder = tmp_path_factory.mktemp("models")
    modules = dict[str, Any]()
    for name in NETS:
        saved(name, folder / name, SEED)
        modules[name] = AutoModelForCausalLM.from_pretrained(folder / name).eval()  # some buffers are not saved
        tokenizer(folder / name, specials=False, **({"chat_template": CHAT} if name == "llama" else {}))
    saved("bert", folder / "bert")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in (*NETS, "bert")]
    with serve(configured(*specs)) as live:
        yield Writers(live, modules, folder)


def run(module: Any, ids: list[int], layer: str = "", edit: Edit | None = None, **options: Any) -> dict[str, Any]:
    """The library's own generation, with what a layer, the output head and all attention returned in each call."""
    module.config._attn_implementation = "eager"
    seen = defaultdict[str, list[Array]](list)

    def keep(name: str, part: nn.Module, args: object, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        if name == layer and edit is not None:
            value = edit(len(seen[name]), value)
        seen[name].append(value.numpy().copy())
        return (value, *output[1:]) if isinstance(output, tuple) else value

    hooks = [
        part.register_forward_hook(partial(keep, name))
        for name, part in module.named_modules()
        if name and name in (layer, "lm_head")
    ]
    fixed = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    flags = dict.fromkeys(("return_dict_in_generate", "output_logits", "output_attentions", "use_cache"), True)
    try:
        rows = torch.tensor([ids])
        found = module.generate(rows, attention_mask=torch.ones_like(rows), **{**fixed, **flags, **options})
    finally:
        for hook in hooks:
            hook.remove()
    tokens = found.sequences[0, len(ids) :].tolist()
    return {
        "tokens": tokens,
        "logits": torch.stack(found.logits, 1).numpy(),
        "seen": seen,
        "attention": [each[-1].numpy() for each in found.attentions],
    }


@pytest.mark.parametrize("name", NETS)
def test_greedy(writers: Writers, name: str) -> None:
    """Tokens, their logits, each step of a layer and its attention are the library's, of texts of two lengths."""
    layer, attention = NETS[name], f"{NETS[name]}.{'attn' if name == 'gpt2' else 'self_attn'}:attention"
    of_step = attention.replace(":", "#2:")
    layers = [".[tokens]", ".[logits]", f"{layer}#*", f"{layer}#0", layer, "lm_head#2", attention, of_step]
    found = arrays_of(writers.post(name, *({"tokens": ids} for ids in PROMPTS), layers=layers))
    assert found[".[tokens]"].dtype == np.int64
    for index, ids in enumerate(PROMPTS):
        expected = run(writers.modules[name], ids, layer)
        np.testing.assert_array_equal(found[".[tokens]"][index], expected["tokens"])
        np.testing.assert_allclose(found[".[logits]"][index], expected["logits"][0], atol=1e-5)
        steps = expected["seen"][layer]
        assert len(steps) == STEPS
        np.testing.assert_allclose(found[f"{layer}#0.input{index}"], steps[0], atol=1e-5)
        np.testing.assert_allclose(found[layer][index : index + 1], steps[-1], atol=1e-5)
        for number in range(1, STEPS):
            np.testing.assert_allclose(found[f"{layer}#{number}"][index : index + 1], steps[number], atol=1e-5)
        np.testing.assert_allclose(found["lm_head#2"][index : index + 1], expected["seen"]["lm_head"][2], atol=1e-5)
        for key, number in ((attention, -1), (of_step, 2)):
            own = expected["attention"][number]
            shown = found.get(f"{key}.input{index}", found.get(key, own)[index : index + 1])
            np.testing.assert_allclose(shown, own, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.5}])
def test_draws(writers: Writers, options: Json) -> None:
    """Row n draws as the library does after ``torch.manual_seed(seed + n)``, whatever else draws meanwhile."""
    inputs = [{"tokens": ids} for ids in (PROMPTS[0], PROMPTS[1], PROMPTS[0])]
    generate = {"steps": STEPS, "stop": [], "do_sample": True, "seed": 11, **options}
    reply = writers.post("llama", *inputs, generate=generate).json()
    for index, sent in enumerate(inputs):
        torch.manual_seed(11 + index)
        own = {"do_sample": True, "top_k": 0, **options}
        expected = run(writers.modules["llama"], sent["tokens"], **own)
        assert reply["features"][".[tokens]"]["data"][index] == expected["tokens"]


def scale(number: int, value: Tensor) -> Tensor:
    """A layer's output, larger at each step."""
    return value * 1.5


def add_at_step_2(number: int, value: Tensor) -> Tensor:
    """A layer's output, steered at one step."""
    return value + torch.arange(32) / 4 if number == 2 else value


def zero_last_channels(number: int, value: Tensor) -> Tensor:
    """The output for a text without some channels of its last token."""
    changed = value.clone()
    changed[:, -1, :8] = 0
    return changed if number == 0 else value


PADDED = {
    "input_ids": tensor(np.array([5, 6]))["tensor"],
    "attention_mask": tensor(np.array([1, 0]))["tensor"],
}
STEERED = tensor(np.arange(32, dtype=np.float32) / 4)["tensor"]
ZERO = {"op": "zero", "tokens": [-1], "channels": list(range(8))}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("edit", "call", "change"),
    [
        (scale, "", {"op": "scale", "by": 1.5}),
        (add_at_step_2, "#2", {"op": "add", "tensor": STEERED}),
        (zero_last_channels, "#0", ZERO),
    ],
)
def test_changes(writers: Writers, name: str, edit: Edit, call: str, change: Json) -> None:
    """A change holds at each step, or at one, and all later tokens and scores follow from it, as with a hook."""
    layer = NETS[name].replace("1", "0")
    changes = [{"layer": f"{layer}{call}", **change}]
    layers = [".[tokens]", ".[logits]", f"{layer}#*"]
    found = arrays_of(writers.post(name, {"tokens": PROMPTS[0]}, layers=layers, interventions=changes))
    expected, plain = (run(writers.modules[name], PROMPTS[0], layer, each) for each in (edit, None))
    np.testing.assert_array_equal(found[".[tokens]"][0], expected["tokens"])
    np.testing.assert_allclose(found[".[logits]"][0], expected["logits"][0], atol=1e-5)
    assert not np.allclose(expected["logits"], plain["logits"], atol=1e-3)
    for number, value in enumerate(expected["seen"][layer]):
        np.testing.assert_allclose(found[f"{layer}#{number}"], value, atol=1e-5)


def test_attention_changes(writers: Writers) -> None:
    """The weights of a head, whose keys are shared by several, are replaced at one step."""
    attention = "model.layers.0.self_attn#3:attention"
    changes = [{"layer": attention, "op": "zero", "heads": [1], "keys": [0]}]
    fields = {"layers": [attention, ".[logits]"]}
    plain, found = (
        arrays_of(writers.post("llama", {"tokens": PROMPTS[0]}, interventions=each, **fields)) for each in ([], changes)
    )
    expected = plain[attention].copy()
    assert expected.shape == (1, 4, 1, len(PROMPTS[0]) + 3)
    expected[0, 1, 0, 0] = 0
    np.testing.assert_allclose(found[attention], expected, atol=1e-6)
    np.testing.assert_allclose(found[".[logits]"][:, :3], plain[".[logits]"][:, :3], atol=1e-5)
    assert not np.allclose(found[".[logits]"][:, 3], plain[".[logits]"][:, 3], atol=1e-4)


@pytest.mark.parametrize("layers", [None, ["model.layers.1#*", "model.layers.1", ".[tokens]"]])
def test_stop(writers: Writers, layers: list[str] | None) -> None:
    """A text ends behind an id that stops it, others go on; its layers ran as often as it has tokens."""
    free = [run(writers.modules["llama"], ids, "model.layers.1") for ids in PROMPTS]
    end, lengths = free[0]["tokens"][2], (3, STEPS)
    assert end not in (*free[0]["tokens"][:2], *free[1]["tokens"])
    inputs = [{"tokens": ids} for ids in PROMPTS]
    fields = {} if layers is None else {"layers": layers}
    reply = writers.post("llama", *inputs, generate={"steps": STEPS, "stop": [end]}, **fields)
    tokens = reply.json()["features"][".[tokens]"]["data"] if layers is None else arrays_of(reply)[".[tokens]"].tolist()
    for row, each, length in zip(tokens, free, lengths, strict=True):
        assert row == each["tokens"][:length] + [-1] * (STEPS - length)
    if layers is not None:
        found = arrays_of(reply)
        for index, (each, length) in enumerate(zip(free, lengths, strict=True)):
            steps = each["seen"]["model.layers.1"]
            np.testing.assert_allclose(found["model.layers.1"][index : index + 1], steps[length - 1], atol=1e-5)
            for number in range(STEPS):
                key = f"model.layers.1#{number}"
                shown = found.get(f"{key}.input{index}", found[key][index : index + 1] if key in found else None)
                assert (shown is not None) == (number < length)
                if shown is not None:
                    np.testing.assert_allclose(shown, steps[number], atol=1e-5)
    assert writers.modules["llama"].generation_config.eos_token_id == 3  # the model's own
    own = writers.post("llama", inputs[0], generate={"steps": 30}).json()["features"][".[tokens]"]["data"][0]
    expected = run(writers.modules["llama"], PROMPTS[0], max_new_tokens=30, eos_token_id=3)["tokens"]
    assert own == expected + [-1] * (30 - len(expected))


def test_company(writers: Writers) -> None:
    """Texts of one length share forwards if nothing ends them; else each has what it has alone."""
    prompts = [PROMPTS[0], [4, 11, 5, 6, 7], [9, 8, 7, 6, 5]]
    free = [run(writers.modules["llama"], ids, "model.layers.1") for ids in prompts]
    end = free[0]["tokens"][2]
    for stop in ([], [end]):
        generate = {"steps": STEPS, "stop": stop}
        body = {"layers": [".[tokens]", "model.layers.1#1"], "generate": generate, "model": "llama"}
        inputs = [{"tokens": ids} for ids in prompts]
        reply = writers.live.client.post("/extract", json={**body, "inputs": inputs}).json()
        found = reply["features"]
        for row, (each, tokens) in enumerate(zip(free, found[".[tokens]"]["data"], strict=True)):
            length = each["tokens"].index(end) + 1 if stop and end in each["tokens"] else STEPS
            assert tokens == each["tokens"][:length] + [-1] * (STEPS - length)
            values = found["model.layers.1#1"]["data"][row]
            np.testing.assert_allclose(values, each["seen"]["model.layers.1"][1][0], atol=1e-5)
        assert reply["receipts"][".[tokens]"].get("rows_per_forward") == (1 if stop else None)


def test_chat(writers: Writers) -> None:
    """Messages are written by the folder's template, and what is generated comes as text too."""
    messages = [{"role": "cat", "content": "sat on"}, {"role": "dog", "content": "saw"}]
    library = AutoTokenizer.from_pretrained(writers.folder / "llama")
    ids = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    reply = writers.post("llama", {"messages": messages}).json()
    expected = run(writers.modules["llama"], ids)
    assert reply["features"][".[tokens]"]["data"] == [expected["tokens"]]
    assert reply["texts"] == [library.decode(expected["tokens"], skip_special_tokens=True)]
    body = {"model": "llama", "layers": [".[logits]"], "inputs": [{"messages": messages}, {"tokens": ids}]}
    logits = writers.live.client.post("/extract", json=body).json()["features"][".[logits]"]["data"]
    assert logits[0] == logits[1]
    text = writers.live.client.get("/models/llama").json()["text"]
    assert (text["takes"], text["generates"]) == (["text", "text_pair", "messages", "tokens"], True)
    assert "no chat template" in problem(writers.post("gpt2", {"messages": messages}), 422)["errors"][0]["detail"]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"verify": True}, "no 'verify'"),
        ({"resume": "model.layers.0"}, "no 'resume'"),
        ({"objective": {"kind": "norm"}}, "no gradients"),
        ({"layers": ["model.layers.0:grad_output"]}, "no gradients"),
        ({"layers": ["model.layers.0/add#0"]}, "names a function"),
        ({"layers": ["model.layers.0#7"]}, "there is no call 7"),
        ({"generate": {"steps": 129}}, "128"),
        ({"generate": {"steps": POSITIONS}}, "leave no room"),
        ({"generate": {"steps": POSITIONS - 4}}, "the text has 5 tokens"),
        ({"generate": {"steps": 2, "seed": 3}}, "'seed' is of tokens that are drawn"),
        ({"model": "bert"}, "does not generate"),
        (
            {
                "inputs": [
                    {
                        "tensors": {
                            "input_ids": tensor(np.array([5, 6]))["tensor"],
                            "attention_mask": tensor(np.array([1, 0]))["tensor"],
                        }
                    }
                ]
            },
            "padded",
        ),
    ],
)
def test_refused(writers: Writers, fields: Json, detail: str) -> None:
    """What a generation can't give is refused by name."""
    body = {"model": "llama", "inputs": [{"tokens": PROMPTS[0]}], "generate": {"steps": STEPS}, **fields}
    found = problem(writers.live.client.post("/extract", json=body), 422)
    assert any(detail in each["detail"] for each in [found, *found.get("errors", [])])


def test_few_catalogs(writers: Writers) -> None:
    """Texts of many lengths leave few catalogs, and no hook."""
    for length in range(1, MAX_GENERATIONS + 4):
        row = writers.post("gpt2", {"tokens": [4 + number % (VOCABULARY - 4) for number in range(length)]})
        assert row.status_code == 200
    model = writers.live.engine.manager.registry.get_entry("gpt2").model
    assert model is not None
    shapes = [((length,), (length,), model.model_inputs.make_continued(STEPS)[-1]) for length in range(1, POSITIONS)]
    assert 1 < sum(model.catalogs.get_catalog(each) is not None for each in shapes) <= MAX_GENERATIONS
    assert model.hooks == 0
