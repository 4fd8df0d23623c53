"""``layertap serve``."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from layertap.service.cli.console import ConfigOption, is_interactive, stderr
from layertap.service.cli.setup import check_setup

if TYPE_CHECKING:
    from layertap.service.config.configuration import Configuration
    from layertap.service.engine.models.model_manager import ModelManager
    from layertap.service.fetch.fetcher import Fetcher
    from layertap.service.settings import Settings

log = logging.getLogger("layertap")
STDERR = 2
SPIN_COUNT = "20000"
DRAIN_DELAY_S = 5.0  # balancers look every few seconds


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback only with API keys.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    uds: Annotated[Path | None, typer.Option(help="Path of a Unix socket to listen on, in place of a port.")] = None,
    config: ConfigOption = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    root_path: Annotated[
        str | None, typer.Option(help="Prefix that a proxy has this server beneath, like /features.")
    ] = None,
) -> None:
    """Start the server."""
    from layertap.service import signals

    _open_streams()
    signals.exit_cleanly_on_signals()  # what is imported from here on takes seconds
    settings, configuration, fetcher = check_setup(
        host=host, port=port, uds=uds, config=config, log_level=log_level, root_path=root_path
    )
    if _reloads(settings):
        signals.hold_hangups()
    from layertap.service.http.sockets import listen

    # A mistake is reported at once. Until requests can be answered, connections are refused: a proxy tries elsewhere.
    for listener in listen(settings.host, settings.port, settings.uds):
        listener.close()
    from layertap.service import logs

    text = logs.wants_text(settings.log_format)
    logs.configure(settings.log_level, text)
    if "LAYERTAP_API_KEY" in os.environ and not settings.requires_key:
        log.warning("LAYERTAP_API_KEY is a caller's, and this server asks for no key: LAYERTAP_API_KEYS sets its own")
    if text:
        from layertap.service.cli.startup import print_start

        print_start(stderr, configuration)
    # Threads of an operation wait for each other by spinning; by libgomp's own setting, where another process has taken
    # a core, for so long that a forward takes seconds. torch reads this when it is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    _run(settings, configuration, fetcher)


def _open_streams() -> None:
    """Have standard streams that are closed lead nowhere: a socket of their number would get what libraries print."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(number)
    sys.stderr = sys.stderr or open(STDERR, "w", closefd=False)  # noqa: SIM115  (as long as the process)


def _run(settings: Settings, configuration: Configuration | None, fetcher: Fetcher) -> NoReturn:
    """Serve until the process ends."""
    gc.disable()  # it would look at what is imported again and again, for a fifth of the time
    if settings.workers:
        from layertap.service.engine.execute.processes.fork_server import fork_this_process

        models = configuration.models if configuration is not None else ()
        # As long as there is one thread. What only the server needs is imported beside what the first model needs.
        fork_this_process(next((spec.source for spec in models if spec.load == "startup"), ""))
    from layertap.service import allocator, logs
    from layertap.service.app import create_app
    from layertap.service.cli.startup import print_summary
    from layertap.service.http.protocol import make_server_config
    from layertap.service.http.sockets import format_url, listen
    from layertap.service.process import run_until_stopped

    allocator.keep_large_blocks()

    def settle(manager: ModelManager) -> None:
        gc.freeze()  # what the models imported, torchvision for one, is as much again
        if logs.wants_text(settings.log_format):
            print_summary(stderr, manager, urls[0], requires_key=settings.requires_key)

    app = create_app(settings, configuration, fetcher, settle)
    # What is imported by now stays: a collector that looks through it stops all threads for up to a tenth of a second.
    gc.freeze()
    gc.enable()
    listeners = listen(settings.host, settings.port, settings.uds)
    urls = [format_url(each.getsockname(), "https" if settings.tls_cert else "http") for each in listeners]
    for url in urls:
        log.info("listening on %s", url)
    run_until_stopped(
        make_server_config(app, settings, app.state.engine.metrics),
        listeners,
        app.state.engine.manager,
        _choose_drain_delay(settings),
        app.state.updates.reload_beside if _reloads(settings) else None,
    )


def _reloads(settings: Settings) -> bool:
    """Whether SIGHUP has the configuration read: not where a terminal sends it as it closes, or nothing can be read."""
    return settings.config is not None and not is_interactive()


def _choose_drain_delay(settings: Settings) -> float:
    """Seconds to serve on after being asked to end: none where a person waits for it."""
    if settings.drain_delay_s is not None:
        return settings.drain_delay_s
    return 0.0 if is_interactive() else DRAIN_DELAY_S
