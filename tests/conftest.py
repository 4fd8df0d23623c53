"""Models for tests, and the rule that holds after every one of them: no hook of ours is left anywhere."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from layertap.models import loading
from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import ModelSpec, WarmSpec
from tests.loading import LOADED, load_model
from tests.nets import INPUTS

Loader = Callable[..., LoadedModel]
TRIES, TRY_S = 50, 0.05
WARM = WarmSpec(("conv", "relu#0", "relu", "head", "conv:input"), compile="always")  # of ``tests.nets.Chain``
settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Have Ctrl+C reach what tests start: a shell that runs them in the background has its children ignore it.

    torch's fused layers are off, as wherever a model has been loaded.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def net_spec(factory: str, **fields: object) -> ModelSpec:
    """The configuration of a module of ``tests.nets``, on the CPU, with the weights of a seed."""
    chosen: dict[str, object] = {"weights": "random:0", "device": "cpu", "inputs": INPUTS[factory], **fields}
    return ModelSpec(factory, f"python:tests.nets:{factory}", **chosen)


@pytest.fixture(scope="session")
def shared_nets() -> Callable[[str, frozenset[tuple[str, object]]], LoadedModel]:
    """Each net of ``tests.nets`` once for each set of options; nobody changes them."""
    return cache(lambda factory, fields: loading.load_model(net_spec(factory, **dict(fields))))


@pytest.fixture
def touched() -> list[LoadedModel]:
    """Shared models that a test was given; their hooks are counted at its end."""
    return []


@pytest.fixture
def load_net(shared_nets: Callable[..., LoadedModel], touched: list[LoadedModel]) -> Loader:
    """A module of ``tests.nets`` by its name, with fields of its configuration; shared: not to be changed."""

    def load(factory: str, **fields: object) -> LoadedModel:
        touched.append(shared_nets(factory, frozenset(fields.items())))
        return touched[-1]

    return load


@pytest.fixture
def load_fresh_net() -> Loader:
    """As ``load_net``, but each time another model, which may be changed."""
    return lambda factory, **fields: load_model(net_spec(factory, **fields))


@pytest.fixture(autouse=True)
def _no_hooks_left(touched: list[LoadedModel]) -> Iterator[None]:
    """After every test, no model that was loaded for tests has a hook that it did not bring along."""
    yield
    left = [(number, model) for number, model in list(LOADED.items()) if not _idle(model)]
    for number, _ in left:
        del LOADED[number]  # tests that come after this one are not to blame
    models = [*(model for _, model in left), *(model for model in touched if not _idle(model))]
    assert {model.spec.name: model.hooks for model in models} == {}


def _idle(model: LoadedModel) -> bool:
    """Whether a model is without hooks, if need be once a server's thread is through with it."""
    return not model.hooks or any(threading.Event().wait(TRY_S) or not model.hooks for _ in range(TRIES))


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler; what needs one is left out where there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    return found or pytest.skip("there is no C++ compiler")


@pytest.fixture(scope="session")
def plans(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled graphs of ``WARM``, which takes long: all workers of a run share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled" / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        prepare_warm_plans(load_model(net_spec("Chain", warm=(WARM,)), 1, 1), folder, compiles=True)
    return folder
