"""The check of ``make lint`` for calls that could run code in a file: what it finds, and what it lets pass."""

from __future__ import annotations

import pytest

from tests.unsafe import findings

BAD = {
    "a module": "import pickle",
    "a module by another name": "import importlib\nimportlib.import_module('pickle').loads(b'')",
    "a module by a variable": "from importlib import import_module as get\nget(name)",
    "torch.load": "import torch\ntorch.load(path)",
    "torch.load as a function": "from torch import load as read\nread(path)",
    "torch.load in a partial": "import functools, torch\nread = functools.partial(torch.load, weights_only=True)",
    "torch.load by assignment": "import torch\nread = torch.load\nread(path)",
    "torch.load by getattr": "import torch\ngetattr(torch, 'load')(path)",
    "torch.load said in a dictionary": "import torch\ntorch.load(path, **{'weights_only': True})",
    "torch.hub.load": "from torch import hub\nhub.load(repository, name)",
    "a download": "from torch.hub import load_state_dict_from_url\nload_state_dict_from_url(url)",
    "numpy.load": "import numpy as np\nnp.load(path)",
    "numpy's own reader": "from numpy.lib import format as f\nf.read_array(stream)",
    "yaml.load": "import yaml\nyaml.load(text, yaml.SafeLoader)",
    "eval": "eval(text)",
    "code of a model's directory": "model = cls.from_pretrained(path, trust_remote_code=True)",
}
GOOD = {
    "torch.load of weights": "import torch\ntorch.load(path, map_location='cpu', weights_only=True)",
    "numpy.load of numbers": "import numpy as np\nnp.load(path, allow_pickle=False)",
    "a method of that name": "registry.load(name)\nloaded.load(spec)",
    "a module by its name": "import importlib\nimportlib.import_module('transformers')",
    "words": "'import pickle; torch.load(path)'",
}


@pytest.mark.parametrize("name", BAD)
def test_found(name: str) -> None:
    """Whatever it is called, it is found, with its line."""
    found = findings(BAD[name], "x.py")
    assert found
    assert all(line.startswith("x.py:") for line in found)


@pytest.mark.parametrize("name", GOOD)
def test_passed(name: str) -> None:
    """What reads data as data passes."""
    assert findings(GOOD[name], "x.py") == []


def test_messages_between_processes() -> None:
    """One file may pickle, and nothing worse; no other file may."""
    source = "import pickle\nimport dill\npickle.loads(data)"
    assert findings(source, "service/engine/execute/processes/channel.py") == [
        "service/engine/execute/processes/channel.py:2: imports dill"
    ]
    assert len(findings(source, "service/engine/execute/processes/messages.py")) > 2
