"""What identifies the nets of a folder: ``python -m tests.own_models.identities_of FOLDER NAME…`` prints it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from layertap.models.loading import identify_model
from layertap.models.sources.build import build_model
from layertap.models.spec import InputSpec, ModelSpec


def spec_of(folder: Path, factory: str, name: str = "") -> ModelSpec:
    """The entry of a factory of the folder's ``net.py``, which takes eight numbers."""
    source = f"python:{folder}/net.py:{factory}"
    return ModelSpec(name or factory, source, device="cpu", inputs=(InputSpec("x", (8,)),))


def identify(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The model's part of fingerprints, of nets which import the folder's other files anew."""
    sys.modules.pop("fingerprints_tables", None)
    sys.path.insert(0, str(folder))
    try:
        specs = [spec_of(folder, name) for name in names]
        return {spec.name: identify_model(build_model(spec), spec)[1] for spec in specs}
    finally:
        sys.path.remove(str(folder))


if __name__ == "__main__":
    json.dump(identify(Path(sys.argv[1]), sys.argv[2:]), sys.stdout)
