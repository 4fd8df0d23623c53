"""Layers of a model on a terminal: the tree in colours, with a bar for each layer's share of the forward's cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from layertap.service.http.layer_tree import Json, TreeRow

# The first of these that a type's name holds; the terminal's own sixteen colours, so that its theme decides.
TYPE_STYLES = (
    ("Norm", "blue"),
    ("Conv", "cyan"),
    ("Attention", "magenta"),
    ("Linear", "green"),
    ("Embed", "yellow"),
    ("Pool", "yellow"),
)
CONTAINER, QUIET, WARNING = "bold", "bright_black", "yellow"
SHARE_WIDTH = 4  # 100%
BAR_CELLS = 8
MAX_WIDTH = 10_000  # of a tree that is only measured
EIGHTHS = " ▏▎▍▌▋▊▉"
HOT, WARM = 2 / 3, 1 / 3  # of the dearest layer's share


@dataclass(frozen=True)
class Column:
    """A column: its header, what it shows of a row beside the dearest layer's share, whether it may be left out."""

    header: str
    render: Callable[[TreeRow, float], Text]
    right: bool = False
    optional: bool = False


def print_layers(console: Console, rows: Sequence[TreeRow]) -> None:
    """Print a tree; on a narrow terminal what can be missed is left out, then names are cut."""
    dearest = max((_get_share(row) for row in rows if row.layer and row.layer["leaf"]), default=0.0)
    boundless = console.options.update(width=MAX_WIDTH)
    for columns in _list_choices():
        table = _make_table(rows, dearest, columns)
        if Measurement.get(console, boundless, table).maximum <= console.width:
            break
    console.print(table)


def _list_choices() -> Iterator[tuple[Column, ...]]:
    """All columns, then ever fewer of them."""
    columns: tuple[Column, ...] = COLUMNS
    yield columns
    for column in (each for each in COLUMNS if each.optional):
        columns = tuple(each for each in columns if each is not column)
        yield columns


def _make_table(rows: Sequence[TreeRow], dearest: float, columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    for column in columns:
        justify = "right" if column.right else "left"
        width = SHARE_WIDTH if column.right else None
        table.add_column(column.header, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.render(row, dearest) for column in columns))
    return table


def _render_name(row: TreeRow, dearest: float) -> Text:
    style = CONTAINER if row.layer is None or not row.layer["leaf"] else ""
    return Text.assemble((row.guides, QUIET), (row.label, style if row.layer or not row.guides else "italic"))


def _render_type(row: TreeRow, dearest: float) -> Text:
    named = (style for part, style in TYPE_STYLES if part in row.type)
    return Text(row.type, next(named, "" if row.layer and not row.layer["leaf"] else QUIET))


def _render_output(row: TreeRow, dearest: float) -> Text:
    if row.layer is not None and not row.layer["calls"]:
        return Text(row.output, QUIET)
    shape, _, rest = row.output.partition(" ")
    text = Text(shape)
    text.highlight_regex("×", QUIET)
    return text.append(f" {rest}", QUIET) if rest else text


def _render_parameters(row: TreeRow, dearest: float) -> Text:
    count = row.layer["parameters"] if row.layer else 0
    return Text(f"{count:,}") if count else Text("")


def _render_bar(row: TreeRow, dearest: float) -> Text:
    """A bar of a layer without parts, as long as its share beside that of the dearest one."""
    if row.layer is None or not row.layer["leaf"] or not dearest:
        return Text("")
    part = _get_share(row) / dearest
    eighths = round(part * BAR_CELLS * 8)
    bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    return Text(bar, "red" if part > HOT else "yellow" if part > WARM else "green")


def _render_share(row: TreeRow, dearest: float) -> Text:
    if row.layer is None or not row.layer["calls"]:
        return Text("")
    return Text(f"{_get_share(row):.0%}", "" if row.layer["leaf"] else QUIET)


def _render_cost(row: TreeRow, dearest: float) -> Text:
    layer = row.layer
    return Text(f"{layer['cost']:.0%}" if layer and layer["calls"] else "", QUIET)


def _render_notes(row: TreeRow, dearest: float) -> Text:
    return Text.assemble(*_list_notes(row.layer)) if row.layer else Text("")


def _get_share(row: TreeRow) -> float:
    return max((row.layer and row.layer["share"]) or 0.0, 0.0)


def _list_notes(layer: Json) -> Iterator[tuple[str, str]]:
    """What is to be minded: several calls, hazards."""
    notes = [(f"{layer['calls']} calls", QUIET)] if layer["calls"] > 1 else []
    # That it never runs is told elsewhere.
    notes += [(hazard, WARNING) for hazard in layer["hazards"] if hazard != "never_called"]
    for number, note in enumerate(notes):
        yield from ((", ", QUIET), note) if number else (note,)


COLUMNS = (
    Column("layer", _render_name),
    Column("type", _render_type),
    Column("output", _render_output),
    Column("parameters", _render_parameters, right=True, optional=True),
    Column("share", _render_bar, optional=True),
    Column("", _render_share, right=True),
    Column("up to here", _render_cost, right=True, optional=True),
    Column("", _render_notes),
)
