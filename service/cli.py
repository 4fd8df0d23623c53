"""The command line: ``layertap serve | check | models | layers | plan | extract``."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from layertap.models.errors import IN_THE_LOG, Fault, LayertapError, LoadError, RequestError
from layertap.models.selection.hook_points import Reduction, Selector

if TYPE_CHECKING:  # torch and FastAPI are imported by the commands that need them: --help answers at once
    from layertap.models.registry import Registry
    from layertap.models.selection.plan import Plan
    from layertap.service.config.configuration import Configuration
    from layertap.service.engine.engine import Engine, SizeCheck
    from layertap.service.engine.model_manager import ModelManager
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.features import Features
    from layertap.service.fetch.fetcher import Fetcher
    from layertap.service.inputs.items import ImageItem
    from layertap.service.settings import Settings

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Any layer of any PyTorch model, over HTTP.")
out = Console()
notes = Console(stderr=True)
BATCH = 32
SPINS = "20000"
DRAIN_DELAY_S = 5.0  # balancers look every few seconds
ON_STDERR = "stderr has the traceback"  # of a command that has no log
POOLS = "none, mean, mean_all, max, gem, cls, flatten"

Config = Annotated[Path | None, typer.Option(help="YAML or JSON file that lists the models.")]
Model = Annotated[str | None, typer.Option(help="Model name; the configuration's default without it.")]


def main() -> None:
    """Entry point: an error of the tree is one line on stderr and exit status 2."""
    try:
        app(standalone_mode=True)
    except LayertapError as error:
        _end(_said(error))
    except OSError as error:  # of the operator's own files
        _end(f"{error.filename}: {error.strerror}")


def _end(reason: str) -> NoReturn:
    for line in reason.splitlines():
        notes.print(f"layertap: {line}", markup=False, soft_wrap=True)
    sys.exit(2)


def _said(error: LayertapError) -> str:
    detail = error.detail + (f" ({error.hint})" if error.hint else "")
    return "\n".join((detail.replace(IN_THE_LOG, ON_STDERR), *getattr(error, "__notes__", ())))


def _print_version(wanted: bool) -> None:
    from layertap.service.version import version

    if wanted:
        out.print(f"layertap {version()}", highlight=False)
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take what holds for all commands."""


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback only with API keys.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    config: Config = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    root_path: Annotated[
        str | None, typer.Option(help="Prefix that a proxy has this server beneath, like /features.")
    ] = None,
) -> None:
    """Start the server."""
    from layertap.service import signals

    signals.ends_with_0()  # what is imported from here on takes seconds
    settings, configuration, fetcher = _checked(
        host=host, port=port, config=config, log_level=log_level, root_path=root_path
    )
    from layertap.service.http.sockets import bind

    listeners = bind(settings.host, settings.port)
    from layertap.service import logs, process, terminal

    text = terminal.wants_text(settings)
    logs.configure(settings.log_level, text)
    if text:
        terminal.tell_start(notes, configuration)
    # Threads of an operation wait for each other by spinning; by libgomp's own setting, where another process has taken
    # a core, for so long that a forward takes seconds. torch reads this when it is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    import uvicorn

    from layertap.service import allocator
    from layertap.service.app import create_app
    from layertap.service.http.server_options import make_server_options

    allocator.keep_large_blocks()
    summary = terminal.Summary(notes, listeners[0].getsockname(), settings.guarded)
    asgi = create_app(settings, configuration, fetcher, summary.tell if text else None)
    # What is imported by now stays: a collector that looks through it stops all threads for up to a tenth of a second.
    gc.freeze()
    manager: ModelManager = asgi.state.engine.manager
    delay = settings.drain_delay_s
    if delay is None:
        delay = 0.0 if terminal.is_interactive() else DRAIN_DELAY_S
    chosen = uvicorn.Config(asgi, **make_server_options(settings))
    process.Server(chosen, lambda: manager.alive, manager.abort_loading, manager.withdraw_readiness, delay).work(
        listeners
    )


@app.command()
def check(config: Config = None) -> None:
    """Check settings, configuration and models without serving; status 2 where something is wrong.

    Models are loaded one after another, but for lazy ones whose weights would be downloaded. One that is not required
    may fail.
    """
    settings, configuration, fetcher = _checked(config=config)
    from layertap.service import terminal
    from layertap.service.app import create_engine

    registry = create_engine(settings, configuration, fetcher, warm=False).manager.registry
    left = [entry.spec.name for entry in registry if entry.spec.load == "lazy" and entry.spec.downloads]
    failed = False
    for spec in [entry.spec for entry in registry if entry.spec.name not in left]:
        name = spec.name
        try:
            with _loading(name):
                state = _tried(registry, name)
        except LayertapError as error:
            failed, state = failed or spec.required, f"failed: {_said(error)}"
        out.print(f"{name}: {state}", markup=False, highlight=False, soft_wrap=True)
        registry.unload(name)
    if left:
        state = "not loaded, for weights would be downloaded"
        out.print(f"{terminal.format_list(left, 'models')}: {state}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(2)


def _tried(registry: Registry, name: str) -> str:
    """What a model is once it is loaded; LayertapError where it can't be, or a warm plan names what is not there."""
    from layertap.models.compiled.prepare import make_warm_plan

    model = registry.load(name)
    for warm in model.spec.warm:
        make_warm_plan(model, warm)
    return f"ready on {model.device}, {model.spec.precision}, {len(model.catalog.layers)} layers"


@app.command()
def models(config: Config = None) -> None:
    """List the configured models."""
    engine = _engine(config)
    table = Table("model", "source", "weights", "device", "dtype", "load")
    for entry in engine.manager.registry:
        spec = entry.spec
        name = f"{spec.name} (default)" if spec.name == engine.manager.default else spec.name
        table.add_row(name, spec.shown_source, Path(spec.weights).name, spec.device, spec.dtype, spec.load)
    out.print(table)


@app.command()
def layers(model: Annotated[str, typer.Argument(help="Model name.")], config: Config = None) -> None:
    """Show a model's layers as a tree, with the shapes that one row has."""
    from layertap.models.catalog.layer_tree import format_tree

    engine = _engine(config)
    loaded = engine.manager.registry
    with _loading(model):
        found = loaded.load(model)
    text = format_tree(model, found.catalog.layers.values())
    out.print(text, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)


@app.command()
def plan(config: Config = None) -> None:
    """Compile the warm plans of all configured models now, so that a server finds them; minutes for each new one."""
    engine = _engine(config, warm=True)
    table = Table("model", "layers", "answered by", "ms a row", "with hooks")
    for entry in engine.manager.registry:
        if entry.spec.warm:
            with _loading(entry.spec.name, "compiling"):
                model = engine.manager.registry.load(entry.spec.name)
            for warm, made in zip(entry.spec.warm, model.compiled, strict=True):
                costs = made.costs if made else model.catalog.costs
                figures = (f"{each.seconds(1) * 1000:.1f}" for each in (costs, model.catalog.costs))
                table.add_row(entry.spec.name, ", ".join(warm.layers), "a graph" if made else "hooks", *figures)
    out.print(table)


@app.command()
def extract(
    images: Annotated[list[Path], typer.Argument(help="Pictures.", exists=True, dir_okay=False, readable=False)],
    layers: Annotated[str, typer.Option(help="Layer selectors, separated by commas.")],
    model: Model = None,
    pool: Annotated[str, typer.Option(help=f"One of {POOLS}.")] = "none",
    normalize: Annotated[bool, typer.Option(help="L2 over the last axis of pooled results.")] = False,
    file: Annotated[
        Path | None, typer.Option("--out", help="A .npz, .npy, .safetensors or .json file; a summary without it.")
    ] = None,
    config: Config = None,
) -> None:
    """Take layers of a model for pictures on disk, without a server.

    Pictures that can't be read are named and left out; the exit status is 1 then, and 2 where nothing is left.
    """
    from layertap.service.formats.table import FORMATS

    format_name = file.suffix.removeprefix(".") if file else "json"
    if format_name not in FORMATS:
        raise LayertapError(f"can't write {file}", hint="use a name that ends in ." + ", .".join(FORMATS))
    form = FORMATS[format_name]
    engine = _engine(config)
    reserved = form.reserved | form.reserved_for_files
    features = asyncio.run(_extract(engine, images, _selectors(layers, pool, normalize), model, reserved))
    if file is None:
        out.print(_summary(features))
    else:
        file.write_bytes(form.encode(features, "list"))
        notes.print(f"{file}: {features.rows} rows, fingerprint {features.fingerprint}", markup=False)
    if features.skipped:
        raise typer.Exit(1)


def _settings(**given: Any) -> Settings:
    from layertap.service.settings import read_settings

    return read_settings(**given)


def _checked(**given: Any) -> tuple[Settings, Configuration | None, Fetcher]:
    """The settings, the configuration that they name, if any, and what fetches URLs: what can be wrong before torch.

    LayertapError.
    """
    from layertap.service.config.configuration import read_configuration
    from layertap.service.settings import LOOPBACK

    settings = _settings(**given)
    if settings.host not in LOOPBACK and not settings.guarded:
        raise LayertapError(
            f"refusing to listen on {settings.host} without an API key", hint="set LAYERTAP_API_KEYS, or use 127.0.0.1"
        )
    configuration = read_configuration(settings.config, before_loading=True) if settings.config else None
    from layertap.service.fetch.fetcher import Fetcher  # takes as long to import as all above

    return settings, configuration, Fetcher(settings)


def _engine(config: Path | None, *, warm: bool = False) -> Engine:
    from layertap.service.app import create_engine

    return create_engine(_settings(config=config), warm=warm)


def _selectors(layers: str, pool: str, normalize: bool) -> tuple[Selector, ...]:
    from layertap.models.selection.selectors import parse_selector

    if pool not in POOLS.split(", "):
        raise LayertapError(f"there is no pool {pool!r}", hint=f"use one of {POOLS}")
    reduction = Reduction(pool=pool, normalize=normalize)  # type: ignore[arg-type]  # checked above
    return tuple(replace(parse_selector(name), reduction=reduction) for name in layers.split(",") if name)


async def _extract(
    engine: Engine,
    images: Sequence[Path],
    selectors: tuple[Selector, ...],
    model: str | None,
    reserved: frozenset[str],
) -> Features:
    """All pictures that can be read, a batch at a time, with a bar where it takes long; the others are named."""
    from layertap.service.engine.decoder import get_preprocessing
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.features import join_features
    from layertap.service.formats.reply_format import check_names

    def fits(plan: Plan, rows: int) -> None:
        """A file may be as large as the disk holds."""
        check_names((result.key for result in plan.results), reserved)

    limits = engine.settings
    size = min(BATCH, limits.max_inputs, limits.max_queue_rows)
    parts: list[Features] = []
    left_out: list[Fault] = []
    try:
        with _waiting("loading the model"):
            get_preprocessing(await engine.manager.get_model(model, float("inf")))
        with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
            bar = progress.add_task("extracting", total=len(images))
            for at in range(0, len(images), size):
                places = range(at, min(at + size, len(images)))
                items, faults = _read(images, places)
                ask = ExtractRequest(
                    model,
                    items,
                    selectors,
                    time.monotonic() + 3600,
                    on_error="skip",
                    faults=faults,
                    isolated=True,  # the same bits every time
                )
                part, faults = await _batch(engine, ask, fits, parts[0] if parts else None)
                parts += [part] if part else []
                left_out += faults
                for fault in faults:
                    notes.print(f"{_shown(images[fault.input or 0])}: {fault.detail}", markup=False, soft_wrap=True)
                progress.advance(bar, len(places))
    finally:
        await engine.close()
    if not parts:
        raise LayertapError("nothing could be extracted")
    whole = replace(join_features(parts), errors=tuple(left_out))
    return replace(whole, files=tuple(_shown(path) for at, path in enumerate(images) if at not in whole.skipped))


def _read(images: Sequence[Path], places: Iterable[int]) -> tuple[tuple[tuple[int, ImageItem], ...], tuple[Fault, ...]]:
    """The bytes of pictures with their places, and the faults of files that can't be read."""
    from layertap.service.inputs.items import ImageItem

    items, faults = [], []
    for place in places:
        try:
            items.append((place, ImageItem(images[place].read_bytes())))
        except OSError as error:
            faults.append(Fault(error.strerror or "can't be read", pointer=f"/inputs/{place}", input=place))
    return tuple(items), tuple(faults)


async def _batch(
    engine: Engine, ask: ExtractRequest, fits: SizeCheck, first: Features | None
) -> tuple[Features | None, tuple[Fault, ...]]:
    """The features of a batch, None where not one of its pictures can be used, and the faults of those that can't."""
    if not ask.items:
        return None, ask.faults
    try:
        part = await engine.extract(ask, fits)
    except RequestError as error:
        if not error.faults or any(fault.input is None for fault in error.faults):
            raise
        return None, error.faults
    if first is None or _row_shapes(part) == _row_shapes(first):
        return part, part.errors
    good = [place for place, _ in ask.items if place not in part.skipped]
    return None, (*part.errors, *(Fault("its results have another shape than the first", input=each) for each in good))


def _row_shapes(features: Features) -> dict[str, list[int]]:
    """The shapes of results without the axis of the rows."""
    return {
        key: [size for axis, size in enumerate(array.shape) if axis != features.receipts[key].row_axis]
        for key, array in features.arrays.items()
    }


def _shown(path: Path) -> str:
    """A file's name as text; bytes that are none are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _summary(features: Features) -> Table:
    table = Table("layer", "shape", "dtype", "mean", "std", "min", "max")
    for key, array in features.arrays.items():
        numbers = (array.mean(), array.std(), array.min(), array.max())
        table.add_row(key, "×".join(map(str, array.shape)), array.dtype.name, *(f"{number:.4g}" for number in numbers))
    return table


@contextmanager
def _loading(name: str, what: str = "loading") -> Iterator[None]:
    """A note while a model is loaded; what the operator's own code raised is shown with its traceback."""
    from layertap.service.engine.model_manager import OWN_CODE

    try:
        with _waiting(f"{what} {name}"):
            yield
    except LoadError as error:
        if error.kind in OWN_CODE and error.__cause__ is not None:
            print_exception(error.__cause__)
        raise


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    with notes.status(f"{what} …"):
        yield
