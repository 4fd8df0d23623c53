"""Functions of a model, called in the thread of its replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.hooks.attach import ForwardEnded, end_forwards
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica
from layertap.service.engine.batch import LastingFailure
from layertap.service.engine.execute.batch_runner import find_lasting_failure
from layertap.service.engine.execute.threads import wrap_error

ModelFunction = Callable[[LoadedModel], Any]


class OverdueError(RuntimeError):
    """A call was ended because it took longer than it may."""


@dataclass(frozen=True)
class CallOutcome:
    """What a function of the model returned or raised; ``failure``: why the model can't answer any more, if so."""

    result: Any | LayertapError | RuntimeError
    failure: LastingFailure | None = None


def call_model(
    model: LoadedModel, replica: Replica, function: ModelFunction, must_end: Callable[[], bool] | None = None
) -> CallOutcome:
    """Call a function of a model in its replica's thread; returns once the device has computed the result.

    Once ``must_end`` says so it is ended, with an OverdueError, before the next module that a forward calls.
    """
    try:
        with end_forwards(replica.module, must_end) if must_end is not None else nullcontext():
            result = function(model)
        transfer.synchronize_stream(model.device)  # threads with other streams may use the result
    except ForwardEnded:
        return CallOutcome(OverdueError())
    except LayertapError as error:
        return CallOutcome(error)
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio uses these
        wrapped = wrap_error(error)
        return CallOutcome(wrapped, find_lasting_failure(wrapped, model, replica))
    return CallOutcome(result)
