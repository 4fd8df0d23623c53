"""The header ``Server-Timing`` (https://www.w3.org/TR/server-timing/)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

QUOTED = r'"(?:[^"\\]|\\.)*(?:"|$)'  # one that nobody closes goes to the end
ENTRY = re.compile(rf'(?:{QUOTED}|[^,"])+')
PARAMETER = re.compile(rf'(?:{QUOTED}|[^;"])+')
STRING = re.compile(r'"((?:[^"\\]|\\.)*)')
ESCAPE = re.compile(r"\\(.)")


class Entry(NamedTuple):
    """One entry: its name, its milliseconds and its description where it has them."""

    name: str
    dur: float | None = None
    desc: str | None = None

    @property
    def label(self) -> str:
        """What to count it under: an entry without a time says something by its description."""
        return self.name if self.dur is not None or self.desc is None else f"{self.name}: {self.desc}"


def parse(header: str) -> list[Entry]:
    """The entries, in order; what can't be read is left out. Of a parameter given twice the first counts."""
    entries = []
    for text in ENTRY.findall(header):
        name, *parameters = [part.strip() for part in PARAMETER.findall(text)] or [""]
        if name and not text.lstrip().startswith(";"):
            given = dict(reversed([_parameter(each) for each in parameters]))
            entries.append(Entry(name, _number(given.get("dur")), given.get("desc")))
    return entries


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    value = value.strip()
    quoted = STRING.match(value)
    return name.strip().lower(), ESCAPE.sub(r"\1", quoted[1]) if quoted else value


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
