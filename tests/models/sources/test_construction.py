"""What a module is constructed with: random numbers of a seed, a default dtype that comes back, nobody beside it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from layertap.models.devices.turns import block_construction, construct_alone
from layertap.models.sources.state_dict import digest_weights


def test_seed_reaches_construction_and_nothing_else() -> None:
    """Two constructions under one seed are equal, under another differ, and the process's random numbers go on."""
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    made = []
    for seed in (5, 5, 6):
        with construct_alone(seed):
            made.append(digest_weights(nn.Linear(3, 2)))
    assert torch.equal(torch.rand(3), expected)
    assert made[0] == made[1] != made[2]
    torch.manual_seed(5)
    assert digest_weights(nn.Linear(3, 2)) == made[0]


def test_one_at_a_time() -> None:
    """A thread that constructs waits for one that began before, so that both draw what they draw alone."""
    begun, waits, goes_on = Event(), Event(), Event()

    def construct_first() -> str:
        with construct_alone(1):
            torch.set_default_dtype(torch.float64)
            begun.set()
            assert goes_on.wait(60)
            return digest_weights(nn.Linear(2, 2))

    def construct_second() -> str:
        waits.set()
        with construct_alone(None):
            assert goes_on.is_set()
            return digest_weights(nn.Linear(3, 2))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(construct_first)
        assert begun.wait(60)
        second = pool.submit(construct_second)
        assert waits.wait(60)
        goes_on.set()
        assert [first.result(), second.result()] == [construct_first(), construct_second()]
    assert torch.get_default_dtype() == torch.float32


def test_none_while_another_draws() -> None:
    """A construction waits for a run that must not see the generator set back."""
    waits, goes_on = Event(), Event()

    def construct() -> None:
        waits.set()
        with construct_alone(0):
            assert goes_on.is_set()

    with ThreadPoolExecutor(1) as pool, block_construction():
        waiting = pool.submit(construct)
        assert waits.wait(60)
        goes_on.set()
    waiting.result()


TWO_LOADS = """
import sys
from threading import Thread
from layertap.models.sources.build import build_model
from layertap.models.spec import InputSpec, ModelSpec

def load_second():
    while "torchvision" not in sys.modules:
        pass
    inputs = (InputSpec("images", (3, 64, 80), as_list=True),)
    build_model(ModelSpec("second", "python:tests.service.detection_nets:build", weights="DEFAULT", inputs=inputs))
    print("second")

second = Thread(target=load_second)
second.start()
build_model(ModelSpec("first", "torchvision:resnet18", weights="random:0"))
print("first")
second.join()
"""


@pytest.mark.slow
def test_no_library_is_met_half_imported() -> None:
    """A model whose code begins with a part of torchvision loads while another thread imports the whole."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", TWO_LOADS], cwd=root, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["first", "second"], done.stderr
