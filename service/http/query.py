"""The part of a URL behind the question mark."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache

from starlette.datastructures import QueryParams

from layertap.models.errors import RequestError, escape, find_nearest, suggest

MAX_CACHED, MAX_CACHED_BYTES = 64, 512  # queries that are remembered, and how long each may be
MAX_LIST_ITEMS = 50_000  # in one parameter
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Query:
    """A query as it was sent, and as it was read."""

    text: bytes
    parameters: QueryParams = field(compare=False)

    @classmethod
    def parse(cls, text: bytes) -> Query:
        """What was sent, read."""
        return _parse_cached(text) if len(text) <= MAX_CACHED_BYTES else cls(text, QueryParams(text))

    @property
    def is_cacheable(self) -> bool:
        """Whether what is made of it may be remembered."""
        return len(self.text) <= MAX_CACHED_BYTES

    def get_one(self, key: str) -> str | None:
        """What a parameter says, None where it is not given; RequestError where it is given several times."""
        values = self.parameters.getlist(key)
        if len(values) > 1:
            raise RequestError(f"the query parameter '{key}' is given {len(values)} times", hint="give it once")
        return values[0] if values else None

    def get_list(self, key: str) -> list[str]:
        """What a parameter says, once or several times, cut at commas."""
        values = self.parameters.getlist(key)
        return [item for value in values for item in value.split(",", MAX_LIST_ITEMS) if item]

    def get_flag(self, key: str) -> bool:
        """Whether a parameter says true; RequestError where it says neither that nor false."""
        value = self.get_one(key)
        flag = FLAGS.get("false" if value is None else value.lower())
        if flag is None:
            raise RequestError(f"'{key}' is true or false")
        return flag

    def check_names(self, allowed: AbstractSet[str], reason: str = "") -> None:
        """RequestError where a parameter is none of these; ``reason`` says why there are no others."""
        for key in self.parameters:
            if key not in allowed:
                offered = ", ".join(sorted(allowed))
                near = find_nearest(key, sorted(allowed))
                use = f"use {offered}" if offered else "leave it out"
                hint = f"{reason}; its query parameters are {offered}" if reason else suggest(near) or use
                raise RequestError(f"the query parameter {escape(key)} is not taken here", hint=hint)

    def check(self, allowed: AbstractSet[str]) -> None:
        """RequestError where a parameter is none of these, or given several times."""
        self.check_names(allowed)
        for key in allowed:
            self.get_one(key)


@lru_cache(maxsize=MAX_CACHED)
def _parse_cached(text: bytes) -> Query:
    """Remembered, as is the body in it: clients send the same over and over, and reading takes longer than all else."""
    return Query(text, QueryParams(text))
