"""The process that all hosts are forked from: it has imported what they need, and has one thread of Python."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing import forkserver, get_context

from layertap.models.spec import ModelSpec

HOST = "layertap.service.workers.model_host"
MAIN = "layertap.service.cli.main"  # what a server's own main module imports, and Python anew in each host
PRELOAD = "layertap.service.workers.preload"
LIBRARIES = ("torchvision", "timm", "transformers")


def start_fork_server(specs: Iterable[ModelSpec]) -> None:
    """Start the process, where it does not run yet; it imports while the server goes on.

    It has the libraries of models that are wanted from the start; one that is not there it leaves out.
    """
    kinds = {spec.source.partition(":")[0] for spec in specs if spec.load == "startup"}
    libraries = [f"{PRELOAD}.{name}" for name in LIBRARIES if name in kinds]
    get_context("forkserver").set_forkserver_preload([HOST, MAIN, *libraries, f"{PRELOAD}.freeze"])
    forkserver.ensure_running()
