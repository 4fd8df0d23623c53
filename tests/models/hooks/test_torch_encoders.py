"""torch's own encoders and decoders, with padding masks of every form, against torch without any hook of ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from tests.loading import load_model
from tests.models.extraction import extract_plan
from tests.oracle import seeded

HERE = "tests.models.hooks.test_torch_encoders"
TOKENS, TARGETS, WIDTH, HEADS = 6, 5, 16, 4
# By row, the positions that only pad it: none, the last, the first, some in the middle.
PADDED = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]]).bool()


class PaddedEncoder(nn.Module):
    """An encoder with a padding mask, a boolean one or one to be added."""

    def __init__(self, *, nested: bool = True, added: bool = False, norm: bool = False, causal: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH) if norm else None, nested)
        self.added, self.causal = added, causal

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        padding = self.make_padding(pad)
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=padding.dtype) if self.causal else None
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)

    def make_padding(self, pad: Tensor) -> Tensor:
        """The mask as the encoder is given it."""
        return torch.zeros(pad.shape).masked_fill(pad, -torch.inf) if self.added else pad


class Translator(nn.Module):
    """``nn.Transformer`` with the masks of the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True)

    def forward(self, x: Tensor, pad: Tensor, y: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(TARGETS, dtype=torch.bool)
        found: Tensor = self.transformer(
            x, y, tgt_mask=causal, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True
        )
        return found


INPUTS = (InputSpec("x", (TOKENS, WIDTH)), InputSpec("pad", (TOKENS,), "bool"))
# By name, whether torch may nest padded rows, whether masks are added, a last norm, a causal mask.
FORMS: dict[str, dict[str, bool]] = {
    "nested, boolean": {},
    "nested, added, norm": {"added": True, "norm": True},
    "dense, boolean, causal": {"nested": False, "causal": True},
    "dense, added, norm, causal": {"nested": False, "added": True, "norm": True, "causal": True},
}


def made(name: str, *inputs: InputSpec, **options: Any) -> tuple[LoadedModel, nn.Module]:
    """A model as it is served, and the same as torch alone has it."""
    fields = {"weights": "random:0", "inputs": (*INPUTS, *inputs), "device": "cpu", "args": options}
    model = load_model(ModelSpec("padded", f"python:{HERE}:{name}", **fields))
    seeded(model.module, 3)
    return model, seeded(globals()[name](**options), 3).eval().requires_grad_(False)


def attended(module: nn.Module, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of encoder layers and the weights of all attention, from each module's own plain formula."""
    module, seen = copy.deepcopy(module), dict[str, Tensor]()

    def ask(part: nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
        return args, options | {"need_weights": True, "average_attn_weights": False}

    for name, part in module.named_modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        if isinstance(part, nn.MultiheadAttention):

            def keep(part: nn.Module, args: Any, out: Any, name: str = name) -> None:
                seen[f"{name}:attention"] = out[1]

            part.register_forward_pre_hook(ask, with_kwargs=True)
            part.register_forward_hook(keep)
        if isinstance(part, nn.TransformerEncoderLayer):

            def take(part: nn.Module, args: Any, out: Any, name: str = name) -> None:
                seen[name] = out.clone()

            part.register_forward_hook(take)
    with torch.enable_grad():  # off the fast path, where masks are booleans
        module(**{name: value.clone() for name, value in rows.items()})
    return seen


def compare(model: LoadedModel, plain: nn.Module, rows: dict[str, Tensor]) -> None:
    """The model's output in all positions, layers and attention where a row has tokens."""
    count = len(rows["x"])
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with torch.no_grad():
            truth = torch.cat(
                [plain(**{name: value[row : row + 1] for name, value in rows.items()}) for row in range(count)]
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(False)
    inside = attended(plain, rows)
    plan = make_plan([parse_selector(text) for text in (".", *inside)], model.catalog)
    taken = extract_plan(model, rows, plan, model.catalog, 8)
    found = {result.key: taken[result.capture].values for result in plan.results}
    torch.testing.assert_close(found.pop("."), truth, rtol=1e-4, atol=1e-5)
    for key, value in found.items():
        for row in range(count):
            own = ~rows["pad"][row] if "encoder" in key else slice(None)
            expected, got = (each[row][..., own, :] for each in (inside[key], value))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # that torch alone makes
@pytest.mark.parametrize("form", FORMS)
def test_encoders(form: str) -> None:
    """What torch's fast path returns and, inside, what its plain one computes; rows together and one alone."""
    model, plain = made("PaddedEncoder", **FORMS[form])
    generator = torch.Generator().manual_seed(5)
    padded = PADDED[:2] if "causal" in form else PADDED  # a query that may look at nothing has no weights
    rows = {"x": torch.randn(len(padded), TOKENS, WIDTH, generator=generator), "pad": padded}
    compare(model, plain, rows)
    compare(model, plain, {name: value[1:2] for name, value in rows.items()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_and_decoder() -> None:
    """nn.Transformer: its encoder's, its decoder's and the cross attention."""
    model, plain = made("Translator", InputSpec("y", (TARGETS, WIDTH)))
    generator = torch.Generator().manual_seed(5)
    rows = {
        "x": torch.randn(len(PADDED), TOKENS, WIDTH, generator=generator),
        "pad": PADDED,
        "y": torch.randn(len(PADDED), TARGETS, WIDTH, generator=generator),
    }
    compare(model, plain, rows)
    layers = model.catalog.layers
    assert sum(layer.has_attention for layer in layers.values()) == 3
    assert layers["transformer.decoder.layers.0.multihead_attn"].calls[0].get_boundary("attention").tensors[
        0
    ].shape == (1, HEADS, TARGETS, TOKENS)
