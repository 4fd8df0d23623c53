"""A model's host: a process that loads the model and is copied for each worker, so that weights are stored once.

It has one thread of Python, and runs operations on one thread: after a forward on several, a copy's own forward on
several would never end, since libgomp believes in threads that a copy does not have.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from typing import NoReturn, TypeVar, cast

import torch
from PIL import Image

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.devices.memory import measure_private_bytes
from layertap.models.errors import LayertapError, LoadError, make_load_error
from layertap.models.inputs.library_processor import LibraryProcessor
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.models.loading import load_model
from layertap.models.model_info import ModelInfo
from layertap.models.sources.python import add_search_folders
from layertap.service import allocator, logs
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.limits import be_killed_first, end_with_parent, limit_memory
from layertap.service.engine.execute.processes.messages import (
    Hello,
    HostOptions,
    ProcessEnded,
    ProcessStarted,
    TakeTurn,
    TurnEnded,
    WaitForProcess,
)
from layertap.service.engine.execute.processes.progress import Progress, map_progress
from layertap.service.engine.execute.processes.references import WorkerReferences
from layertap.service.engine.execute.processes.worker import DecodingWorker, Worker

T = TypeVar("T")
CreateWorker = Callable[[Progress], DecodingWorker]
log = logging.getLogger("layertap")
MAX_ENDED = 64  # workers that have ended, and nobody has asked how


def run_model_host(connection: socket.socket, options: HostOptions, parent: int) -> None:
    """Load a model, or nothing, tell the server of it, and start workers until the server closes the connection.

    ``parent`` is the number of the process that started this one, and with which it ends.
    """
    end_with_parent(parent)
    logs.configure(options.settings.log_level, logs.wants_text(options.settings.log_format))
    allocator.keep_large_blocks()
    add_search_folders(options.folders)
    torch.set_num_threads(1)
    channel = Channel(connection)
    try:
        answer, create_worker = _load(options, channel) if options.pictures is None else _prepare_decoding(options)
    except BaseException as error:  # a third party's code may raise anything
        with suppress(EOFError):
            channel.send(_to_load_error(error))
        return
    gc.collect()
    gc.freeze()  # a collector that writes to what is shared would make copies of it
    with suppress(EOFError):
        channel.send(answer)
        _serve(channel, create_worker, options)


def _load(options: HostOptions, channel: Channel) -> tuple[ModelInfo, CreateWorker]:
    """What to tell the server of the model, and what makes its workers in their processes."""
    settings = options.settings
    costs_folder = settings.cache_dir / "costs"
    take_turn = nullcontext if options.reload else partial(_take_turn, channel)
    model = load_model(
        options.spec,
        threads=settings.cpu_threads,
        costs_folder=costs_folder,
        run_survey=run_in_copy,
        take_turn=take_turn,
    )
    if options.plans:
        model = prepare_warm_plans(model, options.plans, run_in_copy, take_turn, options.reload)
    return _describe(model), lambda progress: Worker(model, progress, settings)


@contextmanager
def _take_turn(channel: Channel) -> Iterator[None]:
    """Wait for other models' hosts as ``turns.take_turn`` does for models of one process: the server knows of all."""
    channel.send(TakeTurn())
    channel.receive()
    try:
        yield
    finally:
        channel.send(TurnEnded())


def _prepare_decoding(options: HostOptions) -> tuple[Hello, CreateWorker]:
    """The same for workers that only decode pictures."""
    pictures = cast("ModelInputs", options.pictures)
    return Hello(), lambda progress: DecodingWorker(pictures, progress, options.settings)


def run_in_copy(function: Callable[[], T]) -> T:
    """What a function gives or raises in a copy of this process; LoadError where it ends the copy, or raises no error.

    What it gives can be pickled.
    """
    channel, connection = connect()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        _answer_and_exit(function, Channel(connection), parent)
    connection.close()
    ended = False
    try:
        result = channel.receive()
    except EOFError:
        ended = True
    channel.close()
    _, status = os.waitpid(pid, 0)
    if ended:
        ended_with = os.waitstatus_to_exitcode(status)
        refusal = LoadError(f"a forward ended its process (status {ended_with})")
        refusal.kind = "killed" if ended_with == -signal.SIGKILL else "forward"
        raise refusal
    if isinstance(result, LayertapError):
        raise result
    return cast("T", result)


def _answer_and_exit(function: Callable[[], object], channel: Channel, parent: int) -> NoReturn:
    status = 1
    try:
        end_with_parent(parent)
        try:
            result = function()
        except BaseException as error:
            result = error if isinstance(error, LayertapError) else _to_load_error(error)
        channel.send(result)
        status = 0
    finally:
        os._exit(status)


def _to_load_error(error: BaseException) -> LayertapError:
    """What to tell the server of an error."""
    return error if isinstance(error, LayertapError) else make_load_error(error)


def _describe(model: LoadedModel) -> ModelInfo:
    """The model as the server sees it: texts and pictures are made into rows here, by what the model brought along."""
    gc.collect()
    info = ModelInfo(**{each.name: getattr(model, each.name) for each in fields(ModelInfo)})
    info = replace(info, process_bytes=measure_private_bytes())
    inputs, text = info.model_inputs, info.model_inputs.text
    if isinstance(inputs.preprocess, LibraryProcessor):
        inputs = replace(inputs, preprocess=replace(inputs.preprocess, run=process_elsewhere))
    if text is not None and text.encode is not None:
        inputs = replace(inputs, text=replace(text, encode=encode_elsewhere))
    return replace(info, model_inputs=inputs)


def encode_elsewhere(text: str) -> list[int]:
    """In place of a tokenizer that is in another process."""
    raise NotImplementedError(f"{len(text)} characters are to be sent to a worker")


def process_elsewhere(image: Image.Image) -> NoReturn:
    """In place of an image processor that is in another process."""
    raise NotImplementedError(f"{image.width} by {image.height} pixels are to be sent to a worker")


def _serve(channel: Channel, create_worker: CreateWorker, options: HostOptions) -> NoReturn:
    """Start workers, and tell how they ended, as the server asks; EOFError once it closes the connection."""
    ended: dict[int, int] = {}  # how those ended that nobody has asked for
    while True:
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, WaitForProcess):
            channel.send(ProcessEnded(ended.pop(message.pid) if message.pid in ended else _wait(message.pid)))
        else:
            ended |= _collect_ended()
            for pid in list(ended)[:-MAX_ENDED]:
                del ended[pid]
            channel.send(ProcessStarted(_start_worker(channel, descriptors, create_worker, options)))


def _wait(pid: int) -> int | None:
    """The exit status of a worker, which ends; None for a process that is none of this one's."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def _collect_ended() -> dict[int, int]:
    """The workers that have ended, and how: until somebody asks the system keeps an entry for each."""
    found = {}
    with suppress(ChildProcessError):
        while (each := os.waitpid(-1, os.WNOHANG))[0]:
            found[each[0]] = os.waitstatus_to_exitcode(each[1])
    return found


def _start_worker(
    channel: Channel, descriptors: Sequence[int], create_worker: CreateWorker, options: HostOptions
) -> int:
    connection, memory = descriptors
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        _work_and_exit(
            Channel(socket.socket(fileno=connection), WorkerReferences()),
            map_progress(memory),
            create_worker,
            options,
            parent,
        )
    os.close(connection)
    os.close(memory)
    return pid


def _work_and_exit(
    channel: Channel, progress: Progress, create_worker: CreateWorker, options: HostOptions, parent: int
) -> NoReturn:
    status = 1
    try:
        end_with_parent(parent)
        be_killed_first()
        limit_memory(options.worker_bytes)
        create_worker(progress).serve(channel)
        status = 0
    except BaseException:
        log.critical("a worker failed", exc_info=True, extra={"fields": {"model": options.spec.name}})
    finally:
        os._exit(status)
