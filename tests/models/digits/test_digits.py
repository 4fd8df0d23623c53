"""The embedded default model."""

from __future__ import annotations

import pytest

from bench.digits import CARD, count_correct, load_splits
from layertap.models.digits import WEIGHTS, spec
from layertap.models.sources.build import BuiltModel, build_model
from layertap.models.sources.state_dict import digest_weights


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    return build_model(spec())


def figure(name: str) -> str:
    lines = [line for line in CARD.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert len(lines) == 1
    return lines[0].split("|")[2].strip()


def test_held_out_accuracy_is_the_cards(model: BuiltModel) -> None:
    """The shipped weights recognise at least 98 % of the held-out pictures, and the card gives that very figure."""
    training, held_out = load_splits()
    hits, count = count_correct(model.module, held_out), len(held_out.labels)
    assert hits / count >= 0.98
    assert figure("Held-out accuracy") == f"{hits / count:.4f} ({hits} of {count})"
    assert (figure("Training pictures"), figure("Held-out pictures")) == (f"{len(training.labels):,}", f"{count:,}")


def test_card_describes_the_shipped_weights(model: BuiltModel) -> None:
    """The card's digest and number of parameters are those of the shipped file, which is small."""
    assert figure("Weights digest") == f"`{digest_weights(model.module)}`"
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    assert figure("Parameters") == f"{parameters:,}"
    assert parameters <= 100_000
    assert WEIGHTS.stat().st_size < 500_000
