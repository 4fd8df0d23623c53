"""Settings on their way to processes that Ray starts, on this machine or another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layertap.service.settings import Settings, read_settings

FOLLOW_CORES = ("cpu_threads", "replicas")  # what comes with a machine's cores, of which Ray gives away some
KEYS = frozenset({"api_keys", "admin_keys", "api_keys_file", "admin_keys_file"})


def pick_chosen(settings: Settings, *, keys: bool) -> dict[str, Any]:
    """What was set, as ``read_settings`` takes it elsewhere; what was not comes with the machine that it is for.

    Without ``keys`` nothing is among it that only a server needs to know.
    """
    chosen = {name: getattr(settings, name) for name in settings.model_fields_set if keys or name not in KEYS}
    return {name: value.absolute() if isinstance(value, Path) else value for name, value in chosen.items()}


def read_settings_on_ray(chosen: Mapping[str, Any]) -> Settings:
    """The settings of a process that Ray has started: it uses the cores that it was given, not the machine's.

    SettingsError. ``chosen`` are those of whoever started it, before this process's own environment.
    """
    import ray

    settings = read_settings(**chosen)
    cores = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
    given = {name: cores for name in FOLLOW_CORES if name not in settings.model_fields_set}
    return read_settings(**{**chosen, **given})
