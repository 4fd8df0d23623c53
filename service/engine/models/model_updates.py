"""Replaces, adds and removes models while others answer: one by its entry, all by the configuration file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

from layertap.models.errors import LayertapError, LoadError, RequestError
from layertap.models.registry import ModelEntry
from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.configuration import (
    Changes,
    Configuration,
    check_models,
    compare,
    parse_entry,
    read_configuration,
)
from layertap.service.config.file import ConfigError
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.errors import ConflictError, ForbiddenError

log = logging.getLogger("layertap")
READ_S = 60.0
Exchange = asyncio.Task[LayertapError | None]


class ModelUpdates:
    """Changes the models and their versions. For the event loop only, which it never blocks.

    A model's next version loads beside the current one and replaces it once loaded: no request fails, and each is
    answered by one version. If the load fails, nothing changes.
    """

    def __init__(
        self, manager: ModelManager, configuration: Configuration, path: Path | None, run_in_thread: RunInThread
    ) -> None:
        """``path`` is the configuration file's, None if there is none."""
        self._manager = manager
        self._configuration = configuration
        self._path = path
        self._run_in_thread = run_in_thread
        self._exchanges: dict[str, Exchange] = {}
        self._applying: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()

    async def exchange(self, name: str, data: object, deadline: float) -> Exchange:
        """Begin to load a model's next version from its entry.

        The task returns None once the new version gets new requests, or the error of its load. ForbiddenError,
        RequestError, UnknownModelError; ConflictError if another version is loading, the name is an alias, or the model
        is about to be removed; DeadlineError if the entry's files can't be checked in time.
        """
        while True:
            configuration = self._configuration
            configured, allowed = self._find_configured(name)
            parse = partial(_parse_version, name, data, configured, allowed, configuration.folder or Path.cwd())
            spec = await self._run_in_thread(parse, deadline)  # folders may be on a network
            if self._configuration is configuration:  # else it was reloaded meanwhile
                break
        running = self._manager.registry.get_entry(name)
        specs = [spec if entry is running else entry.spec for entry in self._manager.registry]
        if mistakes := _find_mistakes(specs, self._manager.default, {name: running.spec}):
            raise RequestError(mistakes[0])
        return self._begin_exchange(running, spec)

    async def reload(self) -> tuple[Changes, asyncio.Task[None]]:
        """Reload the configuration file and begin to apply it; the task ends once that is done.

        Waits for models that an earlier reload is loading. ConflictError if there is no file; ConfigError, and nothing
        changes, if it is invalid.
        """
        path = self._path
        if path is None:
            raise ConflictError("there is no configuration file", hint="LAYERTAP_CONFIG or --config names one")
        async with self._reading:
            configuration = await self._run_in_thread(partial(_read_again, path), time.monotonic() + READ_S)
            # Until no model is being replaced, and the previous configuration is in effect; others may begin meanwhile.
            while pending := [task for task in (*self._exchanges.values(), self._applying) if task and not task.done()]:
                await asyncio.wait(pending)
            manager = self._manager
            specs = {entry.spec.name: entry.spec for entry in manager.registry}
            if mistakes := _find_mistakes(configuration.models, configuration.default, specs):
                raise ConfigError("\n".join(mistakes))
            aliases = manager.registry.aliases
            changes = compare(specs.values(), manager.default, aliases, self._configuration, configuration)
            self._configuration = configuration
            log.info("the configuration is read anew", extra={"fields": changes.describe()})
            loading = self._begin_changes(configuration, changes)  # now, or an exchange could begin first and refuse it
            self._applying = manager.run_beside(self._apply(configuration, changes, loading))
            return changes, self._applying

    def reload_beside(self) -> None:
        """Call ``reload`` in the background; the outcome is only logged."""
        self._manager.run_beside(self._reload_and_log())

    async def _reload_and_log(self) -> None:
        try:
            await self.reload()
        except LayertapError as error:
            log.error("the configuration is not read anew", extra={"fields": {"reason": error.detail}})

    def _find_configured(self, name: str) -> tuple[ModelSpec, Allowed]:
        """The configured spec of a model to replace, and what the configuration allows."""
        allowed = self._configuration.allowed
        if allowed is None:
            hint = "who runs the server adds 'allow' to the configuration file"
            raise ForbiddenError("the configuration allows no model to be exchanged", hint=hint)
        model = self._manager.registry.get_entry(name).spec.name
        if model != name:
            hint = f"name the model, {model}; aliases are changed in the configuration file"
            raise ConflictError(f"{name} is an alias", hint=hint)
        configured = {spec.name: spec for spec in self._configuration.models}
        if name not in configured:  # the next reload would bring it back
            raise ConflictError(f"model {name} is about to go: the configuration has it no more", hint="add it there")
        return configured[name], allowed

    def _begin_exchange(self, running: ModelEntry, spec: ModelSpec) -> Exchange:
        if spec.name in self._exchanges:
            raise ConflictError(f"model {spec.name} is being exchanged", hint="come again once it is")
        exchange = self._exchanges[spec.name] = asyncio.create_task(self._exchange(running, spec))
        return exchange

    async def _exchange(self, running: ModelEntry, spec: ModelSpec) -> LayertapError | None:
        entry = running.replacement = running.make_next(spec)
        try:
            await self._manager.exchange(entry)
        except LayertapError as error:
            log.error("a model keeps its version", extra={"fields": {"model": spec.name, "reason": error.detail}})
            entry.fail(error.detail, error.kind if isinstance(error, LoadError) else "other")
            return error
        finally:
            del self._exchanges[spec.name]
        log.info("a model has a new version", extra={"fields": {"model": spec.name}})
        return None

    def _begin_changes(self, configuration: Configuration, changes: Changes) -> list[asyncio.Future[Any]]:
        """Begin to load the models that are new, changed or failed before; returns futures of their loads."""
        manager, loading = self._manager, list[asyncio.Future[Any]]()
        entries = {entry.spec.name: entry for entry in manager.registry}
        for spec in configuration.models:
            entry, handle = entries.get(spec.name), manager.handles.get(spec.name)
            is_changed = spec.name in changes.changed
            if entry is not None and is_changed and not changes.needs_loading(spec.name):
                entry.spec = spec
            elif entry is not None and is_changed and handle is not None and handle.state != "failed":
                loading.append(self._begin_exchange(entry, spec))
            elif entry is None or is_changed or entry.state == "failed":
                handle = manager.put_entry(entry.make_next(spec) if entry is not None else ModelEntry(spec))
                loading += [] if handle is None else [asyncio.ensure_future(handle.wait_until_settled())]
        return loading

    async def _apply(
        self, configuration: Configuration, changes: Changes, loading: Sequence[asyncio.Future[Any]]
    ) -> None:
        """Apply a configuration: once new models have loaded, switch names and remove models."""
        manager = self._manager
        if loading:
            await asyncio.wait(loading)
        new = {spec.name: spec.name for spec in configuration.models if spec.name in manager.registry.aliases}
        names = {**new, **configuration.aliases}
        targets = {name: self._choose_target(name, manager.find_name(name), target) for name, target in names.items()}
        manager.default = self._choose_target("the default", manager.default, configuration.default)
        manager.registry.aliases = {name: target for name, target in targets.items() if target != name}
        for name in changes.removed:
            if name not in {manager.default, *targets.values()}:  # else it is removed at the next reload
                manager.remove_entry(name)
        log.info("the configuration is in effect", extra={"fields": {"models": len(configuration.models)}})

    def _choose_target(self, name: str, former: str, target: str) -> str:
        """The new target of a name; the former one if the new one failed to load."""
        states = {entry.spec.name: entry.state for entry in self._manager.registry}
        if former == target or former not in states or states[target] != "failed":
            return target
        log.error("a name stays where it was", extra={"fields": {"name": name, "model": former, "failed": target}})
        return former


def _parse_version(name: str, data: object, configured: ModelSpec, allowed: Allowed, folder: Path) -> ModelSpec:
    """A model's next version from its entry; ForbiddenError, RequestError. Reads files, so not for the event loop."""
    if not isinstance(data, dict) or data.get("name", name) != name:
        raise RequestError("the body is the model's entry, by the name in the path", hint="leave 'name' out")
    spec = parse_entry({**data, "name": name}, folder)
    allowed.check(spec, configured)
    return spec


def _read_again(path: Path) -> Configuration:
    with suppress(OSError):  # the read below reports a missing file
        if not S_ISREG(path.stat().st_mode):  # a pipe would block the thread forever
            raise ConfigError(f"can't read {path} again: it is no file")
    return read_configuration(path, before_loading=True)


def _find_mistakes(specs: Sequence[ModelSpec], default: str, running: Mapping[str, ModelSpec]) -> list[str]:
    """The mistakes of models together, and changes that are impossible while others run."""
    mistakes = [text for _, text in check_models(specs, default)]
    if any(spec.tf32 != running[spec.name].tf32 for spec in specs if spec.name in running):
        mistakes.append("tf32 holds for the whole process: change it by a restart")
    return mistakes
