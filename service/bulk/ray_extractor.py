"""Answers batches with actors of a Ray cluster. Files are read and written here, as without Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from layertap.models.errors import LayertapError
from layertap.service.bulk.job import Answer, Extractor, Outline, Question
from layertap.service.bulk.sources import Entry
from layertap.service.ray_settings import read_settings_on_ray

if TYPE_CHECKING:  # torch is imported only on the cluster
    from layertap.service.bulk.local import LocalExtractor

CONNECT_S = 10.0
MAX_BATCH_BYTES = 16 * 2**20  # this process holds the batches of all actors
ATTEMPTS = 10  # for a batch whose actors die
STARTS = 3  # of actors that die before they have loaded the model
# A cluster started here sends no usage statistics; errors that its C++ code logs are also raised as exceptions.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}


class RayExtractor(Extractor):
    """Actors of a cluster, each with an engine, a number of CPUs and GPUs, and the ``chosen`` settings.

    One actor is started for each waiting batch, as long as the cluster has room.
    """

    def __init__(self, address: str | None, cpus: float, gpus: float, chosen: Mapping[str, Any]) -> None:
        """Connect to the cluster, or start one; LayertapError."""
        self._ray = _connect(address)
        self._room = _count_places(self._ray, cpus, gpus)
        self._start = partial(self._ray.remote(num_cpus=cpus, num_gpus=gpus)(_Answerer).remote, chosen)
        self._free: asyncio.Queue[Any] = asyncio.Queue()  # an actor for each batch that it can take now, or an error
        self._dead: list[Any] = []
        self._openings: set[asyncio.Task[None]] = set()
        self.in_flight = self.max_input_bytes = self.max_rows = 0  # set by the first actor's reply
        self.max_batch_bytes = MAX_BATCH_BYTES

    async def outline(self, question: Question) -> Outline:
        """The outline of answers, by the first actor; LayertapError."""
        places = self._room
        self._room -= 1
        outline, batches, self.max_input_bytes, self.max_rows = await self._open(question)
        self.in_flight = places * batches
        return outline

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """The answer of a free actor; errors as of any extractor.

        If the actor dies, another one gets the batch: Ray would wait until it can restart the same one.
        """
        for _ in range(ATTEMPTS):
            actor = await self._take(question)
            try:
                answer: Answer = await actor.extract.remote(question, entries)
            except self._ray.exceptions.RayActorError as error:
                reason = error
                if actor not in self._dead:
                    self._dead.append(actor)
                    self._room += 1
                continue
            except self._ray.exceptions.RayError as error:
                self._free.put_nowait(actor)
                raise _find_cause(error) from None
            self._free.put_nowait(actor)
            return answer
        raise _find_cause(reason)

    async def _take(self, question: Question) -> Any:
        """An actor that can take a batch now; LayertapError."""
        while True:
            if self._free.empty() and self._room:
                self._room -= 1
                opening = asyncio.create_task(self._open_another(question))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
            actor = await self._free.get()
            if isinstance(actor, LayertapError):
                self._free.put_nowait(actor)  # for all other batches, too
                raise actor
            if actor not in self._dead:
                return actor

    async def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        for opening in self._openings:  # do not restart actors that die with the cluster
            opening.cancel()
        await asyncio.to_thread(self._ray.shutdown)

    async def _open(self, question: Question) -> tuple[Outline, int, int, int]:
        """Start an actor, and another one if it dies, and wait until it has loaded its model; LayertapError."""
        for _ in range(STARTS):
            actor = self._start()
            try:
                told: tuple[Outline, int, int, int] = await actor.open.remote(question)
            except self._ray.exceptions.RayActorError as error:
                reason = error
                continue
            except self._ray.exceptions.RayError as error:
                raise _find_cause(error) from None
            for _ in range(told[1]):
                self._free.put_nowait(actor)
            return told
        raise _find_cause(reason)

    async def _open_another(self, question: Question) -> None:
        try:
            await self._open(question)
        except LayertapError as error:
            self._free.put_nowait(error)


class _Answerer:
    """An actor with an engine of its own."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        self._chosen = chosen

    @cached_property
    def _extractor(self) -> LocalExtractor:
        from layertap.service.app import create_engine
        from layertap.service.bulk.local import LocalExtractor

        return LocalExtractor(create_engine(read_settings_on_ray(self._chosen), warm=False))

    async def open(self, question: Question) -> tuple[Outline, int, int, int]:
        """The outline, the number of batches at once, the most bytes of an input and the most rows of a batch."""
        each = self._extractor
        return await each.outline(question), each.in_flight, each.max_input_bytes, each.max_rows

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """The answer to a batch."""
        return await self._extractor.extract(question, entries)


def _connect(address: str | None) -> Any:
    """Ray, connected to a running or a new cluster; LayertapError."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise LayertapError("Ray is not installed", hint="pip install 'layertap[ray]'") from None
    host, _, port = (address or "").rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises a plain Exception if a node does not start in time
        raise LayertapError(f"there is no Ray cluster, and none starts: {error}", hint="see ray status") from error
    return ray


def _count_places(ray: Any, cpus: float, gpus: float) -> int:
    """How many actors fit into the idle cluster; LayertapError if none: Ray itself would wait forever."""
    needs = {name: each for name, each in (("CPU", cpus), ("GPU", gpus)) if each}
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = sum(int(min(machine.get(name, 0) / each for name, each in needs.items())) for machine in machines)
    if not places:
        hint = "see ray status; --ray-cpus and --ray-gpus say what an actor has"
        raise LayertapError(f"no machine of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs", hint=hint)
    return places


def _find_cause(error: BaseException) -> LayertapError:
    """The LayertapError that a process of the cluster raised, or one for its other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LayertapError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return LayertapError(f"a process of the Ray cluster failed: {error}")
