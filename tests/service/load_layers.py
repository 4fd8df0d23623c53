"""Layers drawn at random, and what each must be called in the reply, by the grammar's documentation alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random
from typing import Any

from tests.oracle import Key
from tests.service.load_nets import Served
from tests.service.load_reference import How, pools_of

TEXT = re.compile(r"(?P<name>[^#\[:]+)(#(?P<call>\*|-?\d+))?(?P<path>(\[[^\]]*\])*)(:(?P<site>\w+))?")
MAX_ENTRIES = 5
DTYPES = ("float32", "float32", "float16", "int8")


@dataclass(frozen=True)
class Entry:
    """One entry of ``layers``."""

    text: str
    how: How
    alias: str | None = None

    @property
    def is_glob(self) -> bool:
        """Whether it may name several modules."""
        return "*" in self.text.partition("#")[0] or "?" in self.text

    def as_dict(self) -> dict[str, Any]:
        """Its object form."""
        how = {"pool": self.how.pool, "normalize": self.how.normalize, "dtype": self.how.dtype}
        return {"layer": self.text, **how, **({"as": self.alias} if self.alias is not None else {})}


class Clash(Exception):  # noqa: N818
    """Two results would have one key."""


def entries(draw: Random, served: Served, rows: int, *, one_how: bool) -> tuple[Entry, ...]:
    """Some entries, of which each may be reduced in another way unless they all are in one."""
    texts = [_text(draw, served) for _ in range(draw.randint(1, MAX_ENTRIES))]
    named = [list(_named(served, text).values()) for text in texts]
    together = [key for keys in named for key in keys]
    hows = [_how(draw, served, together if one_how else keys, rows) for keys in named]
    if one_how:
        hows = hows[:1] * len(texts)
    found = []
    for number, (text, how, keys) in enumerate(zip(texts, hows, named, strict=True)):
        entry = Entry(text, how)
        may = not one_how and len(keys) == 1 and not entry.is_glob and "#*" not in text
        found.append(Entry(text, how, f"own.{number}") if may and draw.random() < 0.2 else entry)
    return tuple(found)


def results(served: Served, chosen: Sequence[Entry]) -> dict[str, tuple[Key, How]]:
    """The keys of the reply; the same thing once, by its literal name where it has one."""
    spelled = {(key, each.how) for each in chosen if not each.is_glob for key in _named(served, each.text).values()}
    found: dict[str, tuple[Key, How]] = {}
    for each in chosen:
        for name, key in _named(served, each.text).items():
            if each.is_glob and (key, each.how) in spelled:
                continue
            if found.setdefault(each.alias or name, (key, each.how)) != (key, each.how):
                raise Clash
    return found


def _text(draw: Random, served: Served) -> str:
    name, call, path, site = draw.choice(served.keys)
    where = "" if site == "output" else f":{site}"
    runs = served.runs(name)
    numbered = f"#{call}" if runs > 1 else ""
    steps = "".join(f"[{step}]" for step in path)
    kind = draw.random()
    if kind < 0.25 and name != ".":
        return _glob(draw, name) + draw.choice(["", "#*"] if runs > 1 else [""]) + where
    if kind < 0.35 and path:  # everything below a part of the path
        return name + numbered + "".join(f"[{step}]" for step in path[: draw.randrange(len(path))]) + where
    if kind < 0.45 and runs > 1:
        return f"{name}#*{where}"
    if runs > 1 and len(list(_leaves(served, name, call, (), site))) == 1:
        numbered = draw.choice([numbered, f"#{call - runs}"] + ([""] if call == runs - 1 else []))
    return name + numbered + steps + where


def _glob(draw: Random, name: str) -> str:
    at = draw.randrange(len(name))
    return draw.choice([f"{name[:at]}*", f"*{name[at:]}", f"{name[:at]}?{name[at + 1 :]}", f"{name[:at]}*{name[-1]}"])


def _named(served: Served, text: str) -> dict[str, Key]:
    """The keys that one entry gives, with the tensors behind them."""
    match = TEXT.fullmatch(text)
    assert match is not None, text
    pattern, call, site = match["name"], match["call"], match["site"] or "output"
    path = tuple(re.findall(r"\[([^\]]*)\]", match["path"]))
    glob = "*" in pattern or "?" in pattern
    names = dict.fromkeys(key[0] for key in served.keys)
    chosen = [name for name in names if (glob and name != "." and fnmatchcase(name, pattern)) or name == pattern]
    found = []
    for name in chosen:
        runs = served.runs(name)
        calls = range(runs) if call == "*" else [int(call or -1) % runs] if -runs <= int(call or -1) < runs else []
        found += [key for number in calls for key in _leaves(served, name, number, path, site)]
    if len(found) == 1 and not glob and call != "*":
        return {text: found[0]}
    return {_canonical(served, key): key for key in found}


def _leaves(served: Served, name: str, call: int, path: tuple[str, ...], site: str) -> Iterator[Key]:
    for key in served.keys:
        if (key[0], key[1], key[3]) == (name, call, site) and key[2][: len(path)] == path:
            yield key


def _canonical(served: Served, key: Key) -> str:
    name, call, path, site = key
    number = f"#{call}" if served.runs(name) > 1 else ""
    return name + number + "".join(f"[{step}]" for step in path) + ("" if site == "output" else f":{site}")


def _how(draw: Random, served: Served, keys: Sequence[Key], rows: int) -> How:
    pools = frozenset.intersection(*(pools_of(served, key, rows) for key in keys))
    if not pools:
        raise Clash
    pool = draw.choice(sorted(pools))
    floating = all(served.is_float(key) for key in keys)
    dtype = draw.choice(DTYPES)
    if pool == "none" and any(served.axes_of(key)[0] == "T" for key in keys):
        dtype = "float32" if dtype == "int8" else dtype  # its scales would be those of all rows together
    return How(pool, pool != "none" and floating and draw.random() < 0.3, dtype)
