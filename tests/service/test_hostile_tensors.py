"""Arrays that lie, hide code or unpack to more than they should: refused by a running server, and nothing runs."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bench.hard.tensors import CASES
from tests.server import Live
from tests.service.support import Control, problem, raw

RUN = frozenset(["pickle.find_class", "os.system", "subprocess.Popen"])


@dataclass
class Watch:
    """What Python's own auditing tells of code that input brought along; it can't be taken off again, so it is shut."""

    open: bool = True
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.open and event in RUN:
            self.seen.append(event)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    """Everything unpickled, and every command run, in this process while the module's tests run."""
    found = Watch()
    sys.addaudithook(found)
    yield found
    found.open = False


@pytest.mark.parametrize("name", CASES)
def test_refused(live: Live, control: Control, watch: Watch, name: str) -> None:
    """A hostile body, or part of a multipart body, is refused with the reason; nothing of it is unpickled or run."""
    case = CASES[name]
    watch.seen.clear()
    reply = live.client.post("/extract", **raw(case.make(), case.kind, layers="pool"))
    assert case.says in problem(reply, case.status)["detail"]
    if case.kind == "application/x-npy":
        files = {"tensors": ("a.npy", case.make(), case.kind)}
        reply = live.client.post("/extract", files=files, params={"layers": "pool"})
        assert case.says in problem(reply, case.status)["detail"]
    control.check()
    assert watch.seen == []


def test_watched(watch: Watch) -> None:
    """The watch sees an unpickler that meets a class, so that its silence means something."""
    watch.seen.clear()
    assert pickle.loads(pickle.dumps(OrderedDict)) is OrderedDict
    assert watch.seen == ["pickle.find_class"]
