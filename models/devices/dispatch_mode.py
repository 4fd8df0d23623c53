"""Living with torch's compiler: a dispatch mode that does not import it, and forwards that it does not compile."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A ``TorchDispatchMode`` that imports torch's compiler for none of its operations.

    torch hides the ``__torch_dispatch__`` of every mode from its compiler, and imports the compiler to do so at the
    first operation, which takes longer than importing torch. This class hides it only if something else has imported
    the compiler: before that there is nothing to hide it from.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            cls.__torch_dispatch__ = _hide_from_compiler(cls.__dict__["__torch_dispatch__"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch before it hides a mode."""
        return False


def disable_compiled_functions() -> None:
    """Have what ``torch.compile`` made run as it is written, in this process: hooks on parts that it calls run then.

    It matters only once something has imported the compiler. Graphs that are compiled ahead of time are not affected.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and compiler._stance.stance != "force_eager":
        torch.compiler.set_stance("force_eager")


def _hide_from_compiler(dispatch: Any) -> Any:
    hidden = _disable_dynamo(dispatch)

    @functools.wraps(dispatch)
    def choose(*args: Any, **options: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else dispatch)(*args, **options)

    return choose
