"""What requests name at a layer: the sites of a call, where a tensor is found, and its axes; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Site = Literal[
    "output", "input", "grad_output", "grad_input", "attention", "attention_sink", "attention_grad", "function"
]
# Kinds of hook: ``attach.py`` has a row for each.
Side = Literal["output", "input", "attention", "sink", "unfused", "function"]
# The options that take indices along an axis, and the letter of that axis in a layout.
AXES = {"channels": "C", "tokens": "T", "heads": "A", "queries": "Q", "keys": "K"}


@dataclass(frozen=True)
class SiteSpec:
    """The side of a call where a site's value is, or the value whose gradient it is; what may be done there."""

    side: Side
    is_gradient: bool = False
    is_attention: bool = False
    is_editable: bool = False


SITES: dict[Site, SiteSpec] = {
    "output": SiteSpec("output", is_editable=True),
    "input": SiteSpec("input", is_editable=True),
    "grad_output": SiteSpec("output", is_gradient=True, is_editable=True),
    "grad_input": SiteSpec("input", is_gradient=True),
    "attention": SiteSpec("attention", is_attention=True, is_editable=True),
    "attention_sink": SiteSpec("sink", is_attention=True),
    "attention_grad": SiteSpec("unfused", is_gradient=True, is_attention=True),
    "function": SiteSpec("function"),  # of a hook point whose tensor a function takes or returns
}
GRADIENTS = frozenset(name for name, site in SITES.items() if site.is_gradient)
REQUESTED = tuple(name for name in SITES if name != "function")  # a request names the function itself, and its site
OF_FUNCTIONS = ("output", "input")
ATTENTION = frozenset(name for name, site in SITES.items() if site.is_attention)
EDITABLE = frozenset(name for name, site in SITES.items() if site.is_editable)


def split_function(path: tuple[str, ...]) -> tuple[str, Site, tuple[str, ...]]:
    """The parts of a path at the site ``function``: ``add#0``, the side of it, the path within the value there."""
    name, number, side, *rest = path
    return f"{name}#{number}", "input" if side == "input" else "output", tuple(rest)
