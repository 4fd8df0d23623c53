"""The page: one file that asks for nothing outside itself and runs no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layertap.service.load.document import Document
from layertap.service.load.figures import Figures
from layertap.service.load.page.plots import make_drawings
from layertap.service.load.page.scales import format_value
from layertap.service.load.tables import format_counts, make_notes

FOLDER = Path(__file__).parent
HIDDEN = ("url", "connections", "rate", "arrivals", "max_in_flight", "requests")  # said in words


@dataclass(frozen=True)
class Column:
    """A column of the table: left out where ``format`` gives nothing for all requests together."""

    name: str
    format: Callable[[Figures], str]


def make_page(document: Document) -> str:
    """The HTML of a run."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,  # of names that stand in a scenario
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=format_value, share=_format_share)
    rate = document.options["rate"]
    return environment.get_template("page.html.j2").render(
        document=document,
        total=document.results.total,
        rows={**document.results.kinds, "all": document.results.total},
        columns=[each for each in COLUMNS if each.format(document.results.total)],
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        kind_of_loop=_describe_loop(document.options),
        notes=list(make_notes(document.results)),
        drawings=list(make_drawings(document.results, open_loop=rate is not None)),
        settings={name: value for name, value in document.options.items() if name not in HIDDEN},
    )


def _describe_loop(options: Mapping[str, object]) -> str:
    if options["rate"] is None:
        return f"closed loop, {options['connections']} connections"
    return f"open loop, {options['rate']:g} requests a second, {options['arrivals']} arrivals"


def _format_share(figures: Figures) -> str:
    percent = 100 * figures.error_rate
    return "0 %" if not figures.failed else f"{percent:.2g} %"


def _make_percentile(name: str) -> Column:
    def format_percentile(figures: Figures) -> str:
        return "" if figures.latency_ms is None else format_value(getattr(figures.latency_ms, name))

    return Column(name, format_percentile)


COLUMNS = (
    Column("requests", lambda it: format_value(it.requests)),
    Column("good a second", lambda it: format_value(it.goodput)),
    Column("inputs a second", lambda it: format_value(it.rows_per_second)),
    Column("MB a second", lambda it: format_value(it.bytes_per_second / 1e6)),
    *map(_make_percentile, ("p50", "p90", "p99", "max")),
    Column("failed", lambda it: str(it.failed or "")),
    Column("answers by status", lambda it: format_counts(it.statuses)),
    Column("no answer", lambda it: format_counts(it.errors)),
    Column("client left", lambda it: str(it.left or "")),
    Column("not sent", lambda it: str(it.not_sent or "")),
)
