"""Sites and their hooks, one module at a time."""

from __future__ import annotations

from torch import nn

from layertap.models.hooks.attach import ATTACH, count_hooks
from layertap.models.hooks.sites import SITES


def test_a_hook_for_each_site() -> None:
    """Every site that a selector can name has its kind of hook, that of its side; functions have one of their own."""
    assert {"function", "changed_function"} | {site.side for site in SITES.values()} == set(ATTACH)


def test_count() -> None:
    """Hooks of every kind on every part are counted."""
    inner = nn.Sequential(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    model.register_forward_hook(print)
    model[0].register_forward_pre_hook(print)
    inner.register_full_backward_hook(print)
    last = inner[0].register_full_backward_pre_hook(print)
    assert count_hooks(model) == 4
    last.remove()
    assert count_hooks(model) == 3
