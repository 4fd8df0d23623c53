"""What requests name at a layer: the sites of a call, where a tensor is found, and its axes; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Site = Literal["output", "input", "grad_output", "grad_input", "attention", "attention_sink", "attention_grad"]
# Kinds of hook: ``attach.py`` has a row for each. Those of functions see both sides of every function of a call.
Side = Literal["output", "input", "attention", "sink", "unfused", "function", "changed_function"]
# Which call of a module, or of a function in such a call: with its name and number, ``add#0``, and its side.
CallKey = int | tuple[int, str, Side]
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
    "grad_input": SiteSpec("input", is_gradient=True, is_editable=True),
    "attention": SiteSpec("attention", is_attention=True, is_editable=True),
    "attention_sink": SiteSpec("sink", is_attention=True),
    "attention_grad": SiteSpec("unfused", is_gradient=True, is_attention=True),
}
GRADIENTS = frozenset(name for name, site in SITES.items() if site.is_gradient)
ATTENTION = frozenset(name for name, site in SITES.items() if site.is_attention)
EDITABLE = frozenset(name for name, site in SITES.items() if site.is_editable)
OF_FUNCTIONS = tuple(name for name in SITES if name not in ATTENTION)
