"""Tensors by name, and prefixes that training puts before their names, taken off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from torch import Tensor

from layertap.models.errors import LoadError, escape

PARALLEL = "module."  # of DistributedDataParallel, DataParallel and averaged models
COMPILED = "_orig_mod"  # of torch.compile, before whatever was compiled
COUNTERS = frozenset({"n_averaged", "steps"})  # of averaged models, beside what is averaged
HEADS = {"backbone.": "head."}  # MMPretrain keeps a classifier in two parts
MIN_SHARE = 0.5  # of a module's names have to be there under a prefix, else it is none


class StateDict(dict[str, Tensor]):
    """Tensors by name, and what is known of where they are from.

    ``key``: the dictionary in the file that they were in; ``prefix``: what was taken off their names; ``unread``:
    names of what else the file has; ``shared_names``: for each name that was left out, one of the same tensor.
    """

    key: str = ""
    prefix: str = ""
    unread: tuple[str, ...] = ()
    shared_names: Mapping[str, str] = MappingProxyType({})

    def rename(self, shorten: Callable[[str], str | None], prefix: str) -> StateDict:
        """The tensors under other names; those whose new name is None are unread."""
        names = {name: shorten(name) for name in self}
        renamed = StateDict((new, self[name]) for name, new in names.items() if new is not None)
        renamed.key, renamed.prefix = self.key, self.prefix + prefix
        renamed.unread = (*self.unread, *(name for name, new in names.items() if new is None))
        pairs = ((shorten(name), shorten(other)) for name, other in self.shared_names.items())
        renamed.shared_names = {name: other for name, other in pairs if name is not None and other is not None}
        return renamed

    def take_prefixes(self, *prefixes: str) -> StateDict:
        """The tensors whose names begin with one of these, without it; LoadError where there are none."""
        if not any(name.startswith(prefixes) for name in self):
            firsts = Counter(f"{name.partition('.')[0]}." for name in self if "." in name)
            hint = f"they begin with {_join(first for first, _ in firsts.most_common(3))}" if firsts else ""
            shown = _join(prefixes, " or ")
            raise LoadError(f"no tensor of the checkpoint has a name that begins with {shown}", hint=hint)

        def take(name: str) -> str | None:
            return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)

        return self.rename(take, " and ".join(prefixes))


def drop_wrapper_names(state: StateDict) -> StateDict:
    """The tensors without what torch.compile, DistributedDataParallel and averaged models put before their names."""
    if any(COMPILED in name.split(".") for name in state):
        state = state.rename(_drop_compiled, f"{COMPILED}.")
    while any("." in name for name in state) and all(name.startswith(PARALLEL) or name in COUNTERS for name in state):
        state = state.take_prefixes(PARALLEL)
    return state


def fit_names(state: StateDict, wanted: Collection[str]) -> StateDict:
    """The tensors by the names that a module has, where one prefix makes most of them so.

    What the prefix is not before is unread. LoadError where several prefixes do as well.
    """
    counts = Counter(name.removesuffix(tail) for name in state for tail in _list_tails(name) if tail in wanted)
    most = max(counts.values(), default=0)
    if counts[""] == most or most < MIN_SHARE * len(wanted):
        return state
    best = [prefix for prefix, count in counts.items() if count == most]
    if len(best) > 1:
        hint = f"type prefix: {_join(best, ' or ')}"
        raise LoadError(f"the checkpoint has the model's tensors {len(best)} times, under several prefixes", hint=hint)
    head = HEADS.get(best[0])
    if head is None or not counts[head]:
        return state.take_prefixes(*best)
    names = [name.removeprefix(head) for name in state if name.startswith(head)]
    return state.take_prefixes(*best, *([] if any(best[0] + name in state for name in names) else [head]))


def _list_tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _drop_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _join(names: Iterable[str], between: str = ", ") -> str:
    return between.join(escape(name) for name in names)
