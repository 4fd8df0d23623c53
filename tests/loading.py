"""``load_model`` for tests: what it loaded and still lives can be looked at after each of them."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from layertap.models import loading
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import ModelSpec

LOADED: WeakValueDictionary[int, LoadedModel] = WeakValueDictionary()
_numbers = count()


def load_model(spec: ModelSpec, *options: Any, **more: Any) -> LoadedModel:
    """As ``layertap.models.loading.load_model``."""
    model = LOADED[next(_numbers)] = loading.load_model(spec, *options, **more)
    return model
