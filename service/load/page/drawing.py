"""A plot as shapes: what the template writes as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layertap.service.load.page.scales import Scale, format_value

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 24.0, 14.0, 40.0


@dataclass(frozen=True)
class Rect:
    """``style`` is a class of the style sheet, ``title`` what is told when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str = ""


@dataclass(frozen=True)
class Polyline:
    """Points as SVG has them: ``x,y x,y``."""

    points: str
    style: str


@dataclass(frozen=True)
class Text:
    """``anchor``: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    style: str = "tick"


@dataclass(frozen=True)
class Key:
    """An entry of the legend."""

    style: str
    text: str


@dataclass
class Drawing:
    """One plot; ``summary`` says in words what it shows."""

    title: str
    summary: str
    height: float = HEIGHT
    width: float = WIDTH
    rects: list[Rect] = field(default_factory=list)
    lines: list[Polyline] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        """Where the horizontal axis is."""
        return self.height - BOTTOM

    def make_x(self, least: float, most: float, *, log: bool = False, left: float = LEFT) -> Scale:
        """The horizontal scale."""
        return Scale(least, most if most > least else least + 1, left, self.width - RIGHT, log)

    def make_y(self, most: float) -> Scale:
        """The vertical scale, from 0."""
        return Scale(0.0, most or 1.0, self.bottom, TOP)

    def add_x_axis(self, scale: Scale, ticks: Sequence[float], name: str, *, grid: bool = False) -> None:
        """Ticks below, and the axis' name."""
        for tick in ticks:
            x = scale.place(tick)
            if grid:
                self.lines.append(Polyline(f"{x},{TOP} {x},{self.bottom}", "grid"))
            self.texts.append(Text(x, self.bottom + 16, format_value(tick)))
        self.lines.append(Polyline(f"{scale.begin},{self.bottom} {scale.end},{self.bottom}", "axis"))
        self.texts.append(Text((scale.begin + scale.end) / 2, self.height - 6, name, style="name"))

    def add_y_axis(self, scale: Scale, ticks: Sequence[float]) -> None:
        """Ticks at the left, with a line across each."""
        for tick in ticks:
            y = scale.place(tick)
            self.lines.append(Polyline(f"{LEFT},{y} {self.width - RIGHT},{y}", "grid"))
            self.texts.append(Text(LEFT - 8, y + 4, format_value(tick), "end"))

    def add_curve(self, points: Sequence[tuple[float, float]], style: str, text: str) -> None:
        """A line with an entry in the legend; a lone point is a dash."""
        if len(points) == 1:
            ((x, y),) = points
            points = [(x - 6, y), (x + 6, y)]
        if points:
            self.lines.append(Polyline(" ".join(f"{x},{y}" for x, y in points), style))
        self.legend.append(Key(style, text))
