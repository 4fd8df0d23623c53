"""Batches answered by actors of a Ray cluster, through Ray Data. What is written, and where, is as without it."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layertap.models.errors import LayertapError
from layertap.service.bulk.job import Outline, Question, RemainingJob, Rows, cut_batches
from layertap.service.bulk.pipeline import answer_batches
from layertap.service.bulk.sources import Entry
from layertap.service.ray_settings import read_settings_on_ray

if TYPE_CHECKING:  # torch is imported on the cluster alone
    from layertap.service.bulk.local import LocalExtractor

log = logging.getLogger("layertap")
CONNECT_S = 10.0
GROUP = 4  # batches that an actor takes at once, to decode some while it runs others
IN_FLIGHT = 2  # groups of an actor: the next is there when one is done
GROUPS = "groups"  # the only column, of pickled lists
NODE = "ray.io/node-id"  # a label that every node has
# Of a cluster that is started here nothing is told to anybody; what its C++ code logs comes as exceptions too.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}


@dataclass(frozen=True)
class ActorResources:
    """What each actor gets of a cluster."""

    cpus: float
    gpus: float


class RayExtractor:
    """Actors of a cluster, each with an engine; ``chosen`` are the settings that theirs are read with."""

    def __init__(self, address: str | None, resources: ActorResources, chosen: Mapping[str, Any]) -> None:
        """Connect to the cluster, or start one; LayertapError."""
        self._ray = _connect(address)
        if not _has_room(self._ray, resources):  # an autoscaler may add one, so that this is no error
            needs = f"{resources.cpus:g} CPUs and {resources.gpus:g} GPUs"
            log.warning("no machine of the Ray cluster has %s: waiting for one (see ray status)", needs)
        self._resources = resources
        self._chosen = chosen
        self.max_picture_bytes = self.max_batch_bytes = self.max_rows = 0  # an actor tells

    async def outline(self, question: Question) -> Outline:
        """What answers will be like, as a process of the cluster tells; LayertapError."""
        # Once: what it has loaded is gone with its process.
        once = self._ray.remote(num_cpus=self._resources.cpus, num_gpus=self._resources.gpus, max_calls=1)
        reference = once(_describe).remote(self._chosen, question)
        outline: Outline
        outline, limits = await asyncio.to_thread(self._get, reference)
        self.max_picture_bytes, self.max_batch_bytes, self.max_rows = limits
        return outline

    async def answer(self, remaining: RemainingJob) -> AsyncGenerator[Rows, None]:
        """The rows of all batches of ``remaining``, in their order; LayertapError."""
        run, groups = asyncio.get_running_loop().run_in_executor, self._iterate(remaining)
        with ThreadPoolExecutor(1, "ray") as thread:
            try:
                while (group := await run(thread, next, groups, None)) is not None:
                    for rows in group:
                        yield rows
            finally:
                # As long as the cluster is there: Ray Data tidies up by it, and would start another one.
                await run(thread, groups.close)

    async def close(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        await asyncio.to_thread(self._ray.shutdown)

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _find_cause(error) from None

    def _iterate(self, remaining: RemainingJob) -> Generator[list[Rows], None, None]:
        """The rows of groups of batches, in their order; LayertapError."""
        try:
            for row in self._make_dataset(remaining).iter_rows():
                yield pickle.loads(row[GROUPS])  # noqa: S301  (of our own actors)
        except self._ray.exceptions.RayError as error:
            raise _find_cause(error) from None

    def _make_dataset(self, remaining: RemainingJob) -> Any:
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it warns of what is chosen here
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # a block for each group, so a task for each
        groups = ray.data.range(1).map_batches(
            _read_groups,
            fn_kwargs={
                "remaining": replace(remaining, entries=iter(())),
                "folder": Path.cwd(),  # where a list's paths begin
            },
            batch_format="pyarrow",
            num_cpus=0,
            label_selector={NODE: self._ray.get_runtime_context().get_node_id()},
        )
        return groups.map_batches(
            _Answerer,
            fn_constructor_kwargs={
                "chosen": self._chosen,
                "question": remaining.question,
                "outline": remaining.outline,
            },
            batch_format="pyarrow",
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=None, max_tasks_in_flight_per_actor=IN_FLIGHT),
        )


def _read_groups(_: Any, remaining: RemainingJob, folder: Path) -> Iterator[Any]:
    """Read what is left of a source, on the machine where the job was begun: a row for each group of batches."""
    with chdir(folder):
        entries = islice(remaining.open_source().iterate(remaining.first), remaining.first, None)
        batches = cut_batches(entries, remaining.limits)
        while group := list(islice(batches, GROUP)):
            yield _pack(group)


class _Answerer:
    """An actor with an engine of its own, which answers groups of batches."""

    def __init__(self, chosen: Mapping[str, Any], question: Question, outline: Outline) -> None:
        self._runner = asyncio.Runner()
        self._extractor = self._runner.run(_create_extractor(chosen))
        self._question, self._outline = question, outline

    def __call__(self, table: Any) -> Any:
        (group,) = table.column(GROUPS).to_pylist()
        return _pack(self._runner.run(self._answer(pickle.loads(group))))  # noqa: S301  (of our own reader)

    async def _answer(self, group: list[list[Entry]]) -> list[Rows]:
        return [rows async for rows in answer_batches(iter(group), self._extractor, self._question, self._outline)]


def _describe(chosen: Mapping[str, Any], question: Question) -> tuple[Outline, tuple[int, int, int]]:
    """What answers will be like, and the most bytes of a picture, bytes of a batch and rows of it."""

    async def describe() -> tuple[Outline, tuple[int, int, int]]:
        extractor = await _create_extractor(chosen)
        try:
            outline = await extractor.outline(question)
        finally:
            await extractor.close()
        return outline, (extractor.max_picture_bytes, extractor.max_batch_bytes, extractor.max_rows)

    return asyncio.run(describe())


async def _create_extractor(chosen: Mapping[str, Any]) -> LocalExtractor:
    from layertap.service.app import create_engine
    from layertap.service.bulk.local import LocalExtractor

    return LocalExtractor(create_engine(read_settings_on_ray(chosen), warm=False))


def _pack(group: Sequence[object]) -> Any:
    import pyarrow as pa

    return pa.table({GROUPS: pa.array([pickle.dumps(list(group), pickle.HIGHEST_PROTOCOL)], pa.large_binary())})


def _connect(address: str | None) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise LayertapError("Ray is not installed", hint="pip install 'layertap[ray]'") from None
    _check_address(address)
    options = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        ray.init(address, **options)
    except Exception as error:  # whatever it is: Ray raises Exception itself where a node does not start in time
        raise LayertapError(f"Ray does not start: {error}", hint="see ray status") from error
    return ray


def _has_room(ray: Any, resources: ActorResources) -> bool:
    """Whether a machine of the cluster could have an actor, were it idle: Ray itself would wait without a word."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(each.get("CPU", 0) >= resources.cpus and each.get("GPU", 0) >= resources.gpus for each in machines)


def _check_address(address: str | None) -> None:
    """LayertapError where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise LayertapError(f"there is no Ray cluster at {address}: {error}", hint="see ray status") from None


def _find_cause(error: BaseException) -> LayertapError:
    """The error that a process of the cluster has raised, where it is one of ours."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LayertapError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return LayertapError(f"a process of the Ray cluster failed: {error}")
