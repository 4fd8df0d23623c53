"""torchvision, for models of it."""

from contextlib import suppress
from importlib import import_module

with suppress(Exception):
    import_module("torchvision.models")
