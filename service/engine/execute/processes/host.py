"""A model's host: a process that loads the model and is forked for each worker, so that weights are stored once.

It has one thread of Python, and computes on one thread: after a forward on several threads, a forward on several
threads in a forked process would hang, because libgomp expects threads that do not exist there.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.devices.memory import count_oom_kills, measure_private_bytes
from layertap.models.errors import Failure, LayertapError, LoadError, make_load_error
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.inputs.preprocess import LibraryProcessor
from layertap.models.inputs.sound import SoundProcessor
from layertap.models.inputs.video import VideoProcessor
from layertap.models.loading import load_model
from layertap.models.run.compiled_plan import CompiledPlan
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_info import ModelInfo
from layertap.models.sources.python import add_search_folders
from layertap.models.spec import ModelSpec
from layertap.service import allocator, logs
from layertap.service.engine.execute.decode import refuse_here
from layertap.service.engine.execute.processes.channel import Channel, connect, pack
from layertap.service.engine.execute.processes.forking import (
    LOADING_OOM_SCORE,
    WORKER_OOM_SCORE,
    end_child,
    find_cause,
    fork,
    fork_on_request,
    limit_memory,
    set_oom_score,
)
from layertap.service.engine.execute.processes.progress import Progress, map_progress
from layertap.service.engine.execute.processes.worker import DecodingWorker, Worker
from layertap.service.settings import Settings

MAX_TOKENIZER_BYTES = 2**21
T = TypeVar("T")
CreateWorker = Callable[[Progress], DecodingWorker]


@dataclass(frozen=True)
class HostOptions:
    """What a host does: it loads ``spec``, and sends the model's description or the error.

    ``folders``: search folders for users' own models. ``worker_bytes``: the memory that each worker may allocate.
    ``plans``: the folder of the graphs of warm plans; without it they run with hooks. ``pictures``: the model is in the
    server's own process, the host loads nothing and sends None, and its workers only decode pictures for these inputs.
    ``earlier``: the compiled plans of the first load, if requests wait for a model that was loaded before: they are not
    measured again, and the host waits for no turn.
    """

    spec: ModelSpec
    settings: Settings
    folders: Sequence[str]
    worker_bytes: int
    plans: Path | None
    pictures: ModelInputs | None = None
    earlier: Sequence[CompiledPlan | None] | None = None


def run_model_host(options: HostOptions, channel: Channel) -> None:
    """Load a model, if any, describe it to the server, and start workers until the server closes the connection.

    While it loads, the kernel kills it before all others when the system is out of memory.
    """
    oom_score = set_oom_score(LOADING_OOM_SCORE)
    logs.configure(options.settings.log_level, logs.wants_text(options.settings.log_format))
    allocator.keep_large_blocks()
    add_search_folders(options.folders)
    torch.set_num_threads(1)
    loaded = _try(partial(_load, options, channel))
    with suppress(EOFError):
        if isinstance(loaded, LayertapError):
            channel.send(loaded)
            return
        info, create_worker = loaded
        gc.collect()
        gc.freeze()  # a collection would write to shared pages, which copies them
        set_oom_score(oom_score)
        channel.send(info)
        fork_on_request(channel, fork, partial(_work, create_worker, options.worker_bytes), "a worker failed")


def _load(options: HostOptions, channel: Channel) -> tuple[ModelInfo | None, CreateWorker]:
    """The description of the model, if one is loaded, and the factory of its workers."""
    settings = options.settings
    if options.pictures is not None:
        return None, partial(DecodingWorker, options.pictures, settings)
    take_turn = nullcontext if options.earlier is not None else partial(_take_turn, channel)
    model = load_model(
        options.spec,
        threads=settings.cpu_threads,
        notes=settings.notes_dir,
        run_survey=run_in_copy,
        take_turn=take_turn,
    )
    if options.plans:
        model = prepare_warm_plans(model, options.plans, run_in_copy, take_turn, earlier=options.earlier)
    return _describe(model), partial(Worker, model, settings)


@contextmanager
def _take_turn(channel: Channel) -> Iterator[None]:
    """Wait for other models' hosts, all known to the server, as ``turns.take_turn`` does for models of one process.

    The server answers True when it is this host's turn, until False, the model's description or an error.
    """
    channel.send(True)
    channel.receive()
    try:
        yield
    finally:
        channel.send(False)


def run_in_copy(function: Callable[[], T]) -> T:
    """Call a function in a forked process: its picklable result or its error.

    LoadError if the function ends the process, or raises another error than a LayertapError.
    """
    channel, connection = connect()
    oom_kills = count_oom_kills()
    with closing(connection):
        pid = fork(lambda: Channel(connection).send(_try(function)), "a copy of a model's process failed")
    with closing(channel):
        try:
            result = channel.receive()
        except EOFError:
            status = end_child(pid)
            cause = find_cause(status, oom_kills)
            kind: Failure = "forward" if cause == "crash" else cause
            raise LoadError(f"a forward ended its process (status {status})", kind=kind) from None
    end_child(pid)
    if isinstance(result, LayertapError):
        raise result
    return cast("T", result)


def _try(function: Callable[[], T]) -> T | LayertapError:
    """The function's result, or its error as the server receives it: third-party code may raise anything."""
    try:
        return function()
    except BaseException as error:
        return error if isinstance(error, LayertapError) else make_load_error(error)


def _describe(model: LoadedModel) -> ModelInfo:
    """The model as the server sees it, without a large tokenizer or a library processor: the workers run these."""
    gc.collect()
    inputs, text = model.model_inputs, model.text
    if isinstance(how := inputs.preprocess, (LibraryProcessor, SoundProcessor)):
        inputs = replace(inputs, preprocess=replace(how, **NOT_HERE))
    elif isinstance(how, VideoProcessor) and isinstance(how.of_frame, LibraryProcessor):
        inputs = replace(inputs, preprocess=replace(how, of_frame=replace(how.of_frame, **NOT_HERE)))
    if text is not None and text.encode is not None:
        large = () if _is_light(text) else ("encode", "encode_pair")
        elsewhere: Any = {name: refuse_here for name in (*large, "encode_chat", "decode") if getattr(text, name)}
        inputs = replace(inputs, text=replace(text, **elsewhere, encoders={} if large else text.encoders))
    return model.describe(model_inputs=inputs, process_bytes=measure_private_bytes())


def _is_light(text: TextSpec) -> bool:
    """Whether the server may have a copy of the tokenizer: it is quick, and its copy made in a few milliseconds."""
    with suppress(Exception):  # some can't be pickled
        return text.is_fast and pack((text.encode, text.encode_pair, text.encoders))[1] <= MAX_TOKENIZER_BYTES
    return False


NOT_HERE: dict[str, Any] = {"run": refuse_here}


def _work(create_worker: CreateWorker, worker_bytes: int, connection: int, memory: int) -> None:
    set_oom_score(WORKER_OOM_SCORE)
    limit_memory(worker_bytes)
    create_worker(map_progress(memory)).serve(Channel(socket.socket(fileno=connection)))
