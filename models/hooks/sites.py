"""The sites of a call, where a request finds a tensor: one table; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Site = str  # a key of SITES
Side = Literal["output", "input", "attention", "unfused"]  # a kind of hook: ``attach.py`` has a function for each


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
    "attention": SiteSpec("attention", is_attention=True),
    "attention_grad": SiteSpec("unfused", is_gradient=True, is_attention=True),
}
GRADIENTS = frozenset(name for name, site in SITES.items() if site.is_gradient)
ATTENTION = frozenset(name for name, site in SITES.items() if site.is_attention)
EDITABLE = frozenset(name for name, site in SITES.items() if site.is_editable)
