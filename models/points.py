"""Points: which tensor of which call of which layer; sites of a call, axes and grids of a tensor. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal

from layertap.models.errors import escape

Site = Literal[
    "output", "input", "grad_output", "grad_input", "grad_weight", "attention", "attention_sink", "attention_grad"
]
Grid = tuple[int, int]  # rows, columns
# The options that take indices along an axis, and the letter of that axis in a layout.
AXES = {"channels": "C", "tokens": "T", "heads": "A", "queries": "Q", "keys": "K"}
# The letters of a layout, which names a tensor's axes in order.
LETTERS = {
    "N": "rows",
    "C": "channels",
    "T": "tokens or time",
    "H": "height",
    "W": "width",
    "L": "length",
    "A": "heads",
    "Q": "queries",
    "K": "keys",
    "?": "any other",
}
NAME_AXES = f"a letter for each axis: {', '.join(f'{letter} {axis}' for letter, axis in LETTERS.items())}"
GIVE_LAYOUT = f"add 'layout', {NAME_AXES}"
EACH = {"channel": "channels", "head": "heads", "query": "queries", "key": "keys", "token": "tokens"}  # by one entry


# The site of the value that each is, or is the gradient of. Weights are read when a layer begins: at its input.
SITES: dict[Site, Literal["output", "input", "attention", "attention_sink"]] = {
    "output": "output",
    "input": "input",
    "grad_output": "output",
    "grad_input": "input",
    "grad_weight": "input",
    "attention": "attention",
    "attention_sink": "attention_sink",
    "attention_grad": "attention",
}
GRADIENT_SITES: dict[Site, Site] = {"output": "grad_output", "input": "grad_input", "attention": "attention_grad"}
GRADIENTS: frozenset[Site] = frozenset({*GRADIENT_SITES.values(), "grad_weight"})
ATTENTION: frozenset[Site] = frozenset({"attention", "attention_sink", "attention_grad"})
EDITABLE: frozenset[Site] = frozenset({"output", "input", "grad_output", "grad_input", "attention"})
OF_FUNCTIONS = tuple(site for site in SITES if site not in {*ATTENTION, "grad_weight"})


@dataclass(frozen=True)
class Point:
    """One tensor of one call of one layer: ``layer3.0.relu``, call 2, path ``()``, site ``output``.

    ``function``: a function that the layer calls in that call, by name and number: ``add#0``; "": the layer itself.
    """

    layer: str
    call: int
    path: tuple[str, ...]
    site: Site
    function: str = ""

    @property
    def text(self) -> str:
        """The selector that names this point only."""
        return f"{self.format_name(f'#{self.call}')}:{self.site}"

    def format_name(self, call: str = "") -> str:
        """Layer, function and path; ``call`` is the text of the layer's call."""
        return f"{self.layer}{call}{'/' if self.function else ''}{self.function}{format_path(self.path)}"

    @property
    def gradient(self) -> Point:
        """The point of the gradient with respect to the tensor at this one."""
        return Point(self.layer, self.call, self.path, GRADIENT_SITES[SITES[self.site]], self.function)

    @property
    def side(self) -> Point:
        """The side of the call that it is at: a point without path."""
        return Point(self.layer, self.call, (), self.site, self.function)

    @property
    def escaped_text(self) -> str:
        """``text`` in quotes, safe to show."""
        return escape(self.text)


def format_path(path: tuple[str, ...]) -> str:
    """A path as a selector writes it: ``[out][0]``."""
    return "".join(f"[{key}]" for key in path)


def find_grid(tokens: int, known: Grid | None = None) -> Grid | None:
    """The grid of ``tokens`` patches: the known one if it fits, else a square; None if they form no square."""
    if known is not None and prod(known) == tokens:
        return known
    side = isqrt(max(tokens, 0))
    return (side, side) if side and side**2 == tokens else None
