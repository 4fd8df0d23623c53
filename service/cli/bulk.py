"""``layertap bulk``."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layertap.models.errors import LayertapError
from layertap.models.spec import Pool, Truncate
from layertap.service.cli.console import ConfigOption, ModelOption, UrlOption, show_status, stderr, tell
from layertap.service.cli.setup import check_one_answers, create_configured_engine

if TYPE_CHECKING:
    from layertap.service.bulk.job import Extractor, Rows

OTHER_MODEL = 3  # exit status
LINE_S = 10.0  # between lines where there is no terminal
MAX_NAMED = 20  # inputs that are named with their reason


def bulk(
    source: Annotated[str, typer.Argument(help="A folder, a pattern, a .txt of paths, a .tar, a .parquet, a .jsonl.")],
    out: Annotated[Path, typer.Option("--out", help="FILE.parquet, or a folder.")],
    layers: Annotated[
        str, typer.Option(help="Layer selectors, separated by commas, or JSON; the embedding without.")
    ] = "",
    model: ModelOption = None,
    pool: Annotated[Pool | None, typer.Option(help="What makes a vector of each input.")] = None,
    normalize: Annotated[bool, typer.Option(help="L2 over the last axis of pooled results.")] = False,
    layout: Annotated[
        Literal["parquet", "sparse", "safetensors"] | None,
        typer.Option("--format", help="Vectors as Parquet, sparse ones without their zeros; in a folder also arrays."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Of a .parquet or .jsonl source: where the pictures or texts are.")
    ] = None,
    paths: Annotated[bool, typer.Option("--paths", help="The column holds paths of pictures.")] = False,
    keep: Annotated[str, typer.Option(help="Other columns of the source to keep beside the results: id,text.")] = "",
    names: Annotated[str, typer.Option("--as", help="What to call the results' columns, in their order.")] = "",
    reduce: Annotated[
        str, typer.Option(help="Keep no vectors but, by channel, some of: stats, top, histogram, covariance; or cka.")
    ] = "",
    compare: Annotated[
        str | None, typer.Option(help="For the reduction 'cka': the model of --compare-layers; the same without.")
    ] = None,
    compare_layers: Annotated[
        str, typer.Option(help="For 'cka': the layers that --layers are compared to; each other without.")
    ] = "",
    compare_pool: Annotated[Pool | None, typer.Option(help="What makes vectors of --compare-layers.")] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many inputs 'top' keeps of each channel.")] = 9,
    atlas: Annotated[
        bool,
        typer.Option("--atlas", help="Also a page with the strongest pictures of each channel; reduces stats,top."),
    ] = False,
    prompt: Annotated[str | None, typer.Option(help="A prompt of the model, by name, in front of each text.")] = None,
    truncate: Annotated[Truncate | None, typer.Option(help="Cut texts that are too long at this end.")] = None,
    url: UrlOption = None,
    ray: Annotated[bool, typer.Option("--ray", help="Actors of a Ray cluster answer.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="Of the cluster; without it the one of this machine, or one that is started.")
    ] = None,
    ray_cpus: Annotated[float, typer.Option(min=0.0, help="CPUs of each actor.")] = 1.0,
    ray_gpus: Annotated[float, typer.Option(min=0.0, help="GPUs of each actor; a share of one, like 0.25.")] = 0.0,
    restart: Annotated[bool, typer.Option(help="Delete the existing output and start over.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 where an input has no result.")] = False,
    config: ConfigOption = None,
) -> None:
    """Take layers of a model for many pictures or texts, into files that pandas, DuckDB or a vector store open.

    The same command goes on where it was interrupted, however that was. An input that can't be used becomes a
    row with the reason, and is named; with --strict the exit status is then 1. Status 3: the existing output is of
    another model.
    """
    from layertap.service.bulk.bulk import Job, run
    from layertap.service.bulk.job import Question
    from layertap.service.bulk.manifest import OtherModelError
    from layertap.service.bulk.sources import Columns, open_source

    if ray and url is not None:
        raise LayertapError("--ray and --url cannot be combined", hint="leave one out")
    check_one_answers(url, config)
    if ray_address is not None and not ray:
        raise LayertapError("--ray-address means nothing without --ray", hint="add --ray")
    create = partial(_create_extractor, url, config)
    if ray:
        create = partial(_create_ray_extractor, ray_address, ray_cpus, ray_gpus, config)
    columns = Columns(column, _split(keep), paths)
    opened = open_source(source, columns)
    reductions = _split(reduce or ("stats,top" if atlas else ""))
    if atlas and ("top" not in reductions or opened.texts):
        raise LayertapError("an atlas is of pictures, and of the reduction 'top'", hint="add top to --reduce")
    kept = top if "top" in reductions else 0
    other = _write_other(compare, compare_layers, compare_pool)
    question = Question(
        model, _split_layers(layers), pool, normalize, prompt, truncate, opened.texts, reductions, kept, other
    )
    job = Job.parse(question, source, out, layout, columns, _split(names))
    reporter, begun = _Reporter(), time.monotonic()
    try:
        summary = asyncio.run(run(job, opened, create, reporter, restart=restart, atlas=atlas))
    except OtherModelError as error:
        words = [word for word in sys.argv[1:] if word != "--restart"]
        tell(f"layertap: {error.detail}. To embed again:\n{shlex.join(['layertap', *words, '--restart'])}")
        raise typer.Exit(OTHER_MODEL) from None
    finally:
        reporter.stop()
    when = "; it was complete before" if summary.before else ""
    seconds = f", {time.monotonic() - begun:.0f} s"
    tell(f"{out}: {summary.rows} rows, {summary.errors} of them without a result{when or seconds}")
    if summary.errors == summary.rows:
        raise LayertapError("no input has a result", hint="the column 'error' has the reasons; --restart begins anew")
    if summary.errors and strict:
        raise typer.Exit(1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _write_other(model: str | None, layers: str, pool: Pool | None) -> str:
    """The JSON of the field ``with`` of a comparison; "" without such layers. LayertapError."""
    if not layers:
        if model or pool:
            raise LayertapError("--compare and --compare-pool mean nothing without --compare-layers", hint="name some")
        return ""
    entries = [json.loads(entry) if entry.startswith("{") else entry for entry in _split_layers(layers)]
    fields = {"model": model, "layers": entries, "pool": pool}
    return json.dumps({name: value for name, value in fields.items() if value})


def _split_layers(text: str) -> tuple[str, ...]:
    """Selectors with commas between them, or entries as JSON: each as text; none of an empty text."""
    entries: Any = _split(text)
    if text.startswith(("[", "{")):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise LayertapError(f"--layers is no JSON: {error}", hint='write [{"layer": "NAME", …}, …]') from error
        entries = entries if isinstance(entries, list) else [entries]
    if text and not entries:
        raise LayertapError("--layers names no layer", hint="leave it out for the embedding")
    return tuple(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)


def _create_extractor(url: str | None, config: Path | None) -> Extractor:
    if url is not None:
        from layertap.service.bulk.remote import RemoteExtractor

        return RemoteExtractor(url, tell)
    with show_status("loading torch"):
        from layertap.service.bulk.local import LocalExtractor

        return LocalExtractor(create_configured_engine(config, workers=None))


def _create_ray_extractor(address: str | None, cpus: float, gpus: float, config: Path | None) -> Extractor:
    from layertap.service.ray_settings import pick_chosen
    from layertap.service.settings import read_settings

    chosen = pick_chosen(read_settings(config=config), keys=False)
    with show_status("connecting to Ray"):
        from layertap.service.bulk.ray_extractor import RayExtractor

        return RayExtractor(address, cpus, gpus, chosen)


class _Reporter:
    """Reports progress, live on a terminal, else in periodic lines, and names the inputs that failed."""

    def __init__(self) -> None:
        self._status = stderr.status("")
        self._total: int | None = None
        self._first = self._done = self._errors = self._named = 0
        self._begun = self._told = 0.0

    def wait_for_model(self) -> None:
        """The model may have to be loaded first."""
        self._begun = time.monotonic()
        tell("waiting for the model")

    def note_ready(self, model: str) -> None:
        """The model has answered."""
        tell(f"model {model} is ready after {time.monotonic() - self._begun:.1f} s")

    def start(self, rows: int, errors: int, count: Callable[[], int | None]) -> None:
        """It goes on after so many rows, some without a result; all are counted meanwhile."""
        if rows:
            tell(f"{rows} rows are there already, {errors} of them without a result")
        self._first = self._done = rows
        self._errors = errors
        self._begun = self._told = time.monotonic()
        if stderr.is_terminal:
            self._status.start()
        threading.Thread(target=self._count, args=(count,), daemon=True).start()

    def advance(self, rows: Rows) -> None:
        """A batch is answered."""
        self._done += len(rows.keys)
        for key, error in zip(rows.keys, rows.errors, strict=True):
            if error is not None:
                self._tell_error(key, error)
        now = time.monotonic()
        line = self._format_line(max(now - self._begun, 1e-3))
        self._status.update(line)
        if not stderr.is_terminal and now - self._told >= LINE_S:
            self._told = now
            tell(line)

    def stop(self) -> None:
        """Stop reporting."""
        self._status.stop()

    def _count(self, count: Callable[[], int | None]) -> None:
        with suppress(LayertapError, OSError):  # whatever reads the source says so
            self._total = count()

    def _tell_error(self, key: str, error: str) -> None:
        self._errors += 1
        self._named += 1
        if self._named <= MAX_NAMED:
            tell(f"{key}: {error}")
        elif self._named == MAX_NAMED + 1:
            tell("further ones have their reason in the column 'error'")

    def _format_line(self, elapsed: float) -> str:
        rate = (self._done - self._first) / elapsed
        of_all, left = "", ""
        if self._total is not None:
            of_all = f" of {self._total}"
            left = f", {max(self._total - self._done, 0) / rate:.0f} s left"
        return f"{self._done}{of_all} rows, {rate:.0f}/s, {self._errors} without a result{left}"
