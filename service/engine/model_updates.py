"""Models that are exchanged, added and removed while others answer: one by its entry, all by the configuration file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

from layertap.models.errors import LayertapError, LoadError, RequestError
from layertap.models.registry import ModelEntry
from layertap.models.spec import ModelSpec
from layertap.service.config.changes import Changes, compare
from layertap.service.config.checks import check_specs
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.config.document import ConfigError
from layertap.service.config.parsing import parse_entry
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.model_manager import ModelManager
from layertap.service.engine.planner import RunInThread
from layertap.service.errors import ConflictError, ForbiddenError

log = logging.getLogger("layertap")
READ_S = 60.0
Exchange = asyncio.Task[LayertapError | None]


@dataclass(frozen=True)
class Update:
    """A configuration that is taken over: what it changes, and what ends when that is done."""

    changes: Changes
    done: asyncio.Task[None]


class ModelUpdates:
    """Changes which models there are, and their versions. For the event loop only, which it never blocks.

    A model's next version loads beside the one that answers, and takes its place when it is there: no request fails,
    and each is answered by one version. Where it can't be loaded all stays as it was.
    """

    def __init__(
        self, manager: ModelManager, configuration: Configuration, path: Path | None, run_in_thread: RunInThread
    ) -> None:
        """``path`` is that of the configuration's file, None where there is none."""
        self._manager = manager
        self._configuration = configuration
        self._path = path
        self._run_in_thread = run_in_thread
        self._exchanges: dict[str, Exchange] = {}
        self._applying: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()

    def parse(self, name: str, data: object) -> ModelSpec:
        """A model's next version by its entry; ForbiddenError, RequestError, UnknownModelError."""
        allowed = self._configuration.allowed
        if allowed is None:
            hint = "who runs the server adds 'allow' to the configuration file"
            raise ForbiddenError("the configuration allows no model to be exchanged", hint=hint)
        running = self._manager.registry.get_entry(name).spec
        if running.name != name:
            hint = f"name the model, {running.name}; aliases are changed in the configuration file"
            raise ConflictError(f"{name} is an alias", hint=hint)
        if not isinstance(data, dict) or data.get("name", name) != name:
            raise RequestError("the body is the model's entry, by the name in the path", hint="leave 'name' out")
        spec = parse_entry({**data, "name": name}, self._configuration.folder or Path.cwd())
        configured = {each.name: each for each in self._configuration.models}
        if name not in configured:  # it would come back
            raise ConflictError(f"model {name} is about to go: the configuration has it no more", hint="add it there")
        allowed.check(spec, configured[name])
        specs = [spec if entry.spec.name == name else entry.spec for entry in self._manager.registry]
        if mistakes := _find_mistakes(specs, self._manager.default, {name: running}):
            raise RequestError(mistakes[0])
        return spec

    def exchange(self, spec: ModelSpec) -> Exchange:
        """Begin to load a model's next version; ConflictError where another one loads.

        The task gives None once new requests are its own, or why it could not be loaded.
        """
        if spec.name in self._exchanges:
            raise ConflictError(f"model {spec.name} is being exchanged", hint="come again once it is")
        exchange = self._exchanges[spec.name] = asyncio.create_task(self._exchange(spec))
        return exchange

    async def reload(self, deadline: float) -> Update:
        """Read the configuration's file anew, and begin to make models what it says.

        ConflictError where there is no file; ConfigError, and nothing changes, where it makes no sense; DeadlineError
        as well, where models of a former reading load longer.
        """
        return await wait_until(deadline, self._reload())

    async def _reload(self) -> Update:
        path = self._path
        if path is None:
            raise ConflictError("there is no configuration file", hint="LAYERTAP_CONFIG or --config names one")
        async with self._reading:
            configuration = await self._run_in_thread(partial(_read_again, path), time.monotonic() + READ_S)
            await self._wait_for_changes()
            manager = self._manager
            specs = {entry.spec.name: entry.spec for entry in manager.registry}
            if mistakes := _find_mistakes(configuration.models, configuration.default, specs):
                raise ConfigError("\n".join(mistakes))
            changes = compare(specs.values(), manager.default, manager.registry.aliases, configuration)
            self._configuration = configuration
            log.info("the configuration is read anew", extra={"fields": changes.describe()})
            loading = self._begin_changes(configuration, changes)  # now: an exchange that begins first would refuse it
            self._applying = manager.run_beside(self._apply(configuration, changes, loading))
            return Update(changes, self._applying)

    def reload_beside(self) -> None:
        """The same where nobody waits for the answer: the log has it."""
        self._manager.run_beside(self._reload_and_log())

    async def _reload_and_log(self) -> None:
        try:
            await self._reload()
        except LayertapError as error:
            log.error("the configuration is not read anew", extra={"fields": {"reason": error.detail}})

    async def _wait_for_changes(self) -> None:
        """Return once no model is exchanged, and the configuration that was read before is in effect."""
        while pending := [task for task in (*self._exchanges.values(), self._applying) if task and not task.done()]:
            await asyncio.wait(pending)  # others may begin meanwhile

    async def _exchange(self, spec: ModelSpec) -> LayertapError | None:
        manager, entry = self._manager, ModelEntry(spec)
        running = manager.registry.get_entry(spec.name)
        running.replacement = entry
        try:
            if spec.name not in manager.workers:
                manager.room.make_for(entry)
            await manager.exchange(entry)
        except LayertapError as error:
            log.error("a model keeps its version", extra={"fields": {"model": spec.name, "reason": error.detail}})
            entry.fail(error.detail, error.kind if isinstance(error, LoadError) else "other")
            return error
        finally:
            del self._exchanges[spec.name]
        log.info("a model has a new version", extra={"fields": {"model": spec.name}})
        return None

    def _begin_changes(self, configuration: Configuration, changes: Changes) -> list[asyncio.Future[Any]]:
        """Begin to load what is new in a configuration, or failed before; what ends when that is loaded, or failed."""
        specs, workers = {spec.name: spec for spec in configuration.models}, self._manager.workers
        failed = [entry.spec.name for entry in self._manager.registry if entry.state == "failed"]
        again = [name for name in failed if name in specs and name not in changes.changed]
        for name in (*changes.added, *again):
            self._put(specs[name])
        exchanges = [exchange for name in changes.changed if (exchange := self._change(specs[name], changes))]
        loading = (asyncio.wrap_future(workers[name].settled) for name in (*changes.added, *again) if name in workers)
        return [*exchanges, *loading]

    async def _apply(
        self, configuration: Configuration, changes: Changes, loading: Sequence[asyncio.Future[Any]]
    ) -> None:
        """Make models what a configuration says: once what is new has loaded, what is no more goes."""
        manager = self._manager
        if loading:
            await asyncio.wait(loading)
        aliases = {name: self._choose_target(name, target) for name, target in configuration.aliases.items()}
        manager.registry.aliases = aliases
        manager.default = configuration.default
        for name in changes.removed:
            if name not in aliases.values():  # else an alias still means it: it goes when the file is read again
                manager.remove_entry(name)
        log.info("the configuration is in effect", extra={"fields": {"models": len(configuration.models)}})

    def _change(self, spec: ModelSpec, changes: Changes) -> Exchange | None:
        """Give a model its new entry; what loads for that, where it is loaded now."""
        entry = self._manager.registry.get_entry(spec.name)
        worker = self._manager.workers.get(spec.name)
        if not changes.needs_loading(spec.name):
            entry.spec = spec
        elif worker is not None and not worker.failed:
            return self.exchange(spec)
        else:
            self._put(spec)
        return None

    def _put(self, spec: ModelSpec) -> None:
        entry = ModelEntry(spec)
        self._manager.put_entry(entry)
        if spec.load == "startup":
            self._manager.begin_loading(entry)

    def _choose_target(self, alias: str, target: str) -> str:
        """What an alias means from now on: not a model that could not be loaded, where it meant another before."""
        registry = self._manager.registry
        former = registry.aliases.get(alias)
        if former is None or former not in registry or registry.get_entry(target).state != "failed":
            return target
        log.error("an alias stays where it was", extra={"fields": {"alias": alias, "model": former, "failed": target}})
        return former


def _read_again(path: Path) -> Configuration:
    with suppress(OSError):  # of what is not there the reading tells
        if not S_ISREG(path.stat().st_mode):  # a pipe would hold the thread for ever
            raise ConfigError(f"can't read {path} again: it is no file")
    return read_configuration(path, before_loading=True)


def _find_mistakes(specs: Iterable[ModelSpec], default: str, running: Mapping[str, ModelSpec]) -> list[str]:
    """What is wrong with models together, or can't be changed while others run."""
    numbered = dict(enumerate(specs))
    mistakes = [text for _, text in check_specs(numbered, (), [spec.name for spec in numbered.values()], default)]
    if any(spec.tf32 != running[spec.name].tf32 for spec in numbered.values() if spec.name in running):
        mistakes.append("tf32 holds for the whole process: change it by a restart")
    return mistakes
