"""The page: one file that asks for nothing outside itself and runs no script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layertap.service.load.document import Document
from layertap.service.load.figures import Figures
from layertap.service.load.page.plots import make_drawings
from layertap.service.load.page.scales import format_value
from layertap.service.load.tables import format_counts, make_notes

FOLDER = Path(__file__).parent
HIDDEN = ("url", "connections", "rate", "arrivals", "max_in_flight", "requests")  # said in words


def make_page(document: Document) -> str:
    """The HTML of a run."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,  # of names that stand in a scenario
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=format_value, counts=format_counts, share=_format_share)
    rate = document.options["rate"]
    return environment.get_template("page.html.j2").render(
        document=document,
        total=document.results.total,
        rows={**document.results.kinds, "all": document.results.total},
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
