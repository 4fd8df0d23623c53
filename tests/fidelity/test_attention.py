"""Attention of transformers' models that compute it unlike the others, beside the library's own eager weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from layertap.models.errors import RequestError
from layertap.models.loaded_model import LoadedModel
from layertap.models.planner import make_plan
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import ModelSpec
from tests.loading import load_model
from tests.models.extraction import extract_plan
from tests.oracle import seeded
from tests.transformers_nets import TEXT, texts

pytestmark = pytest.mark.slow
HIERA = {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}


def _sinks() -> Any:
    """Two layers with learned sinks, one of which looks at the nearest tokens only."""
    config = transformers.GptOssConfig(
        **TEXT, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    )
    return transformers.GptOssModel(config)


def _saved(make: Callable[[], Any], folder: Path) -> LoadedModel:
    seeded(make(), 3).eval().save_pretrained(folder)
    return load_model(ModelSpec("m", f"transformers:{folder}", device="cpu"))


@torch.no_grad()
def test_sinks(tmp_path: Path) -> None:
    """Weights are those of the library's eager attention, from which what sinks take is missing."""
    model = _saved(_sinks, tmp_path)
    rows = texts(3, 8, padded=True)
    eager = transformers.GptOssModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    wanted = eager(**rows, output_attentions=True).attentions
    catalog = model.catalogs.survey(tuple(tuple(rows[spec.name].shape[1:]) for spec in model.inputs))
    plan = make_plan([parse_selector("*:attention")], catalog)
    found = extract_plan(model, rows, plan, catalog, 8)
    assert len(plan.results) == len(wanted) == 2
    real = rows["attention_mask"].bool()
    for result, weights in zip(plan.results, wanted, strict=True):
        values = found[result.capture].values
        assert (weights.sum(-1) < 0.999).all()
        for row, own in enumerate(real):
            torch.testing.assert_close(values[row][:, own], weights[row][:, own], rtol=1e-4, atol=1e-5)


OTHERS: dict[str, Callable[[], Any]] = {
    # (N, queries, heads, keys of a window)
    "longformer": lambda: transformers.LongformerModel(
        transformers.LongformerConfig(**TEXT, attention_window=4, pad_token_id=0)
    ),
    # (N, heads, windows, queries, keys)
    "hiera": lambda: transformers.HieraModel(transformers.HieraConfig(**HIERA)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_shapes_are_not_offered(tmp_path: Path, kind: str) -> None:
    """Weights that are no (heads, queries, keys) are refused."""
    model = _saved(OTHERS[kind], tmp_path)
    with pytest.raises(RequestError, match="attention"):
        make_plan([parse_selector("*:attention")], model.catalog)
