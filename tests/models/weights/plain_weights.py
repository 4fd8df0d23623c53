"""What transformers loads in a process of its own: ``python -m tests.models.weights.plain_weights``.

Takes directories and prints, for each, every parameter and buffer by name: dtype, shape and SHA-256 of the bytes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Facts = dict[str, list[Any]]
SEED = 7


@dataclass(frozen=True)
class Plain:
    """A directory's weights and those of ``SEED``, the digest of the former, and those that are initialized again."""

    saved: Facts
    random: Facts
    digest: str
    again: Facts


def facts(module: nn.Module) -> Facts:
    """Every parameter and buffer by name, tied ones under each of their names."""
    return {
        name: [str(value.dtype), list(value.shape), hashlib.sha256(raw(value)).hexdigest()]
        for name, value in tensors(module).items()
    }


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer itself."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Those that a checkpoint holds."""
    kept = module.state_dict()
    return {name: value for name, value in tensors(module).items() if name in kept}


def raw(value: Tensor) -> bytes:
    """A tensor's bytes in C order."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def digest(named: dict[str, Tensor]) -> str:
    """The digest of weights as the project describes it."""
    whole = hashlib.sha256()
    for name in sorted(named):
        value = named[name]
        whole.update(json.dumps([name, str(value.dtype).removeprefix("torch."), list(value.shape)]).encode())
        whole.update(raw(value))
    return whole.hexdigest()


def initialized_again(module: nn.Module) -> nn.Module:
    """Whoever loads a model to train it draws some weights anew: here those of torch's own layers, and the last."""
    torch.manual_seed(SEED)
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            part.reset_parameters()
    nn.init.constant_(list(module.parameters())[-1], 0.25)
    return module


def plain(*folders: Path) -> dict[str, Plain]:
    """What the library alone makes of directories, by their names."""
    command = [sys.executable, "-m", "tests.models.weights.plain_weights", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {Path(folder).name: Plain(**found) for folder, found in json.loads(done.stdout).items()}


def _of(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    torch.manual_seed(SEED)
    random = kind(config)
    module = kind.from_pretrained(folder, dtype=torch.float32)
    found = {"saved": facts(module), "random": facts(random), "digest": digest(saved(module))}
    return found | {"again": facts(initialized_again(module))}


if __name__ == "__main__":
    json.dump({folder: _of(Path(folder)) for folder in sys.argv[1:]}, sys.stdout)
