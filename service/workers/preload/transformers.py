"""transformers, for models of it."""

from contextlib import suppress
from importlib import import_module

with suppress(Exception):
    import_module("transformers.modeling_utils")
    import_module("transformers.models.auto.modeling_auto")
