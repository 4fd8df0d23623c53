"""What transformers loads in a process of its own: ``python -m tests.models.sources.plain_weights``.

Takes directories and prints, for each, the digest of the weights that a checkpoint of it holds.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Plain:
    """The digest of a directory's weights."""

    digest: str


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, tied ones under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def digest(named: dict[str, Tensor]) -> str:
    """The digest of weights as the project describes it."""
    whole = hashlib.sha256()
    for name in sorted(named):
        value = named[name]
        whole.update(json.dumps([name, str(value.dtype).removeprefix("torch."), list(value.shape)]).encode())
        whole.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def plain(*folders: Path) -> dict[str, Plain]:
    """What the library alone makes of directories, by their names."""
    command = [sys.executable, "-m", "tests.models.sources.plain_weights", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {Path(folder).name: Plain(found) for folder, found in json.loads(done.stdout).items()}


def _digest_saved(folder: Path) -> str:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    module = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
    kept = module.state_dict()
    return digest({name: value for name, value in tensors(module).items() if name in kept})


if __name__ == "__main__":
    json.dump({folder: _digest_saved(Path(folder)) for folder in sys.argv[1:]}, sys.stdout)
