"""Models for tests, and the rule that holds after every one of them: no hook of ours is left anywhere."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from layertap.models.loaded_model import LoadedModel
from layertap.models.loading import load_model
from layertap.models.spec import ModelSpec, WarmSpec
from tests.nets import INPUTS

Loader = Callable[..., LoadedModel]
TRIES, TRY_S = 50, 0.05
WARM = WarmSpec(("conv", "relu#0", "relu", "head", "conv:input"), compile=True)  # of ``tests.nets.Chain``
settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")


def net_spec(factory: str, **fields: object) -> ModelSpec:
    """The configuration of a module of ``tests.nets``, on the CPU, with the weights of a seed."""
    chosen: dict[str, object] = {"weights": "random:0", "device": "cpu", "inputs": INPUTS[factory], **fields}
    return ModelSpec(factory, f"python:tests.nets:{factory}", **chosen)  # type: ignore[arg-type]


@pytest.fixture
def kept() -> list[LoadedModel]:
    """Models that live until the end of the test, so that their hooks can be counted then."""
    return []


@pytest.fixture(scope="session")
def blamed() -> list[LoadedModel]:
    """Models whose hooks a test has failed for: those after it are not to blame."""
    return []


@pytest.fixture(autouse=True)
def _no_hooks_left(kept: list[LoadedModel], blamed: list[LoadedModel]) -> Iterator[None]:
    """After every test, no model that anything loaded has a hook that it did not bring along."""
    yield
    alive = [item for item in gc.get_referrers(LoadedModel) if type(item) is LoadedModel]
    left = [model for model in alive if not any(model is each for each in blamed) and not _idle(model)]
    blamed += left
    assert {model.spec.name: model.hooks for model in left} == {}


def _idle(model: LoadedModel) -> bool:
    """Whether a model is without hooks, if need be once a server's thread is through with it."""
    return not model.hooks or any(threading.Event().wait(TRY_S) or not model.hooks for _ in range(TRIES))


@pytest.fixture
def load_net(kept: list[LoadedModel]) -> Loader:
    """Loads a module of ``tests.nets`` by its name; fields of its configuration may be given."""

    def loaded(factory: str, **fields: object) -> LoadedModel:
        kept.append(load_model(net_spec(factory, **fields)))
        return kept[-1]

    return loaded


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler; what needs one is left out where there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    return found or pytest.skip("there is no C++ compiler")


@pytest.fixture(scope="session")
def plans(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled graphs that tests share: compiling takes long."""
    return tmp_path_factory.mktemp("cache") / "plans"


@pytest.fixture(scope="session", autouse=True)
def _few_objects() -> Iterator[None]:
    """Takes what imports made out of the garbage collector's sight: looking for models after each test is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
