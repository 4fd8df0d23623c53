"""TransformerLens: activations, edits, patching and gradients of a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.peers.conftest import TOKENS, Served, texts
from tests.service.support import Array, Json, text64

lens = pytest.importorskip("transformer_lens", reason="tests/peers/requirements.txt has it")
pytestmark = [pytest.mark.hard, pytest.mark.filterwarnings("ignore")]

NAMES = {
    "blocks.0.hook_resid_pre": "transformer.h.0[0]:input",
    "blocks.0.hook_resid_mid": "transformer.h.0/add#0",
    "blocks.0.hook_resid_post": "transformer.h.0",
    "blocks.0.hook_attn_out": "transformer.h.0.attn[0]",
    "blocks.1.attn.hook_z": "transformer.h.1.attn.c_proj:input",
    "blocks.1.attn.hook_pattern": "transformer.h.1.attn:attention",
    "blocks.0.mlp.hook_pre": "transformer.h.0.mlp.c_fc",
    "blocks.0.mlp.hook_post": "transformer.h.0.mlp.c_proj:input",
    "blocks.1.hook_mlp_out": "transformer.h.1.mlp",
}
VECTOR = torch.linspace(-2, 2, 32)
Hook = Callable[..., Tensor]


@pytest.fixture(scope="module")
def hooked(served: Served) -> Any:
    """The same weights in TransformerLens, nothing folded into them."""
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    module = served.module("gpt2")
    config = module.config
    own = lens.HookedTransformerConfig(
        n_layers=config.n_layer,
        d_model=config.n_embd,
        n_ctx=config.n_positions,
        n_heads=config.n_head,
        d_head=config.n_embd // config.n_head,
        d_mlp=4 * config.n_embd,
        d_vocab=config.vocab_size,
        act_fn="gelu_new",
        normalization_type="LN",
        eps=config.layer_norm_epsilon,
        device="cpu",
    )
    found = lens.HookedTransformer(own)
    plain = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    found.load_and_process_state_dict(convert_gpt2_weights(module, own), **dict.fromkeys(plain, False))
    return found


def logits(served: Served, inputs: list[Json], **fields: Any) -> Array:
    """All logits."""
    return served.extract("gpt2", inputs, [{"layer": ".[logits]", "as": "logits"}], **fields)["logits"]


def test_cache(served: Served, hooked: Any) -> None:
    """``run_with_cache``: every kind of activation."""
    _, cache = hooked.run_with_cache(TOKENS)
    found = served.extract("gpt2", texts(), [{"layer": name, "as": key} for key, name in NAMES.items()])
    for key in NAMES:
        wanted = cache[key].detach().numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found[key], wanted.reshape(found[key].shape), rtol=1e-4, atol=2e-5)


def scale_head(pattern: Tensor, hook: Any) -> Tensor:
    """One head that attends nowhere."""
    pattern[:, 2] = 0
    return pattern


def steer(stream: Tensor, hook: Any) -> Tensor:
    """A direction for every token."""
    return stream + VECTOR


def drop_position(stream: Tensor, hook: Any) -> Tensor:
    """Nothing at one token."""
    stream[:, 3] = 0
    return stream


DATA = {"dtype": "float32", "shape": [32], "data": text64(VECTOR.numpy().tobytes())}


@pytest.mark.parametrize(
    ("name", "hook", "change"),
    [
        ("blocks.1.attn.hook_pattern", scale_head, {"site": "attention", "op": "zero", "heads": [2]}),
        ("blocks.0.hook_resid_mid", steer, {"op": "add", "tensor": DATA}),
        ("blocks.0.hook_resid_post", drop_position, {"op": "zero", "tokens": [3]}),
        ("blocks.1.hook_mlp_out", steer, {"op": "add", "tensor": DATA}),
    ],
    ids=["head", "steering", "position", "mlp"],
)
def test_edits(served: Served, hooked: Any, name: str, hook: Hook, change: Json) -> None:
    """``run_with_hooks``."""
    layer = NAMES[name].partition(":")[0]
    found = logits(served, texts(), interventions=[{"layer": layer, **change}])
    wanted = hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)]).detach().numpy()
    assert np.abs(wanted - hooked(TOKENS).detach().numpy()).max() > 1e-2
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


def test_patching(served: Served, hooked: Any) -> None:
    """Activation patching of the residual stream, layer by position, by a logit difference: one sweep."""
    clean, corrupt = TOKENS[:1], TOKENS[1:2]
    _, cache = hooked.run_with_cache(clean)
    found = served.sweep(
        "gpt2",
        texts()[:2],
        layers=["transformer.h.*[0]:input"],
        op="replace",
        each="token",
        **{"from": {"input": 0}},
        objective={"kind": "logit", "terms": [[1, 7], [-1, 3]], "position": -1},
    )
    for layer in range(2):
        key = f"blocks.{layer}.hook_resid_pre"
        for position in range(clean.shape[1]):

            def patch(stream: Tensor, hook: Any, key: str = key, position: int = position) -> Tensor:
                stream[:, position] = cache[key][:, position]
                return stream

            last = hooked.run_with_hooks(corrupt, fwd_hooks=[(key, patch)])[0, -1]
            wanted = float(last[7] - last[3])
            value = found[f"transformer.h.{layer}[0]:input"][-1, position]
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5)


def test_gradients(served: Served, hooked: Any) -> None:
    """A logit difference's gradient by the residual stream, as backward hooks of TransformerLens have it."""
    kept: dict[str, Tensor] = {}

    def keep(gradient: Tensor, hook: Any) -> None:
        kept[hook.name] = gradient.detach().clone()

    names = ["blocks.0.hook_resid_mid", "blocks.0.hook_resid_post"]
    with hooked.hooks(bwd_hooks=[(name, keep) for name in names]):
        last = hooked(TOKENS)[:, -1]
        (last[:, 7] - last[:, 3]).sum().backward()
    objective = {"kind": "logit", "terms": [[1, 7], [-1, 3]], "position": -1}
    layers = [{"layer": f"{NAMES[name]}:grad_output", "as": name} for name in names]
    found = served.extract("gpt2", texts(), layers, objective=objective)
    for name in names:
        assert kept[name].abs().max() > 1e-3
        np.testing.assert_allclose(found[name], kept[name].numpy(), rtol=1e-3, atol=1e-5)
