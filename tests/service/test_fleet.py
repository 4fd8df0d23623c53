"""How models come and go: loaded when asked for, once; unloaded when told, or to make room."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from threading import Event

from tests.service.conftest import Serve
from tests.service.exchanged_models import states
from tests.service.gated_server import admitted_rows, gated_module, hold_model, post_rows, wait_until
from tests.service.support import configured, net, problem


def test_lazy(serve: Serve, gate: Event, lines: StringIO) -> None:
    """A lazy model is loaded by the first request for it, once, however many come at once."""
    with serve(configured(net("lazy", "waiting", load="lazy"))) as live:
        assert states(live)["lazy"] == "available"
        with ThreadPoolExecutor(5) as pool:
            replies = [pool.submit(post_rows, live, model="lazy") for _ in range(4)]
            replies.append(pool.submit(live.client.get, "/models/lazy/layers"))
            wait_until(lambda: states(live)["lazy"] == "loading")
            assert live.client.get("/readyz").status_code == 200
            found = problem(post_rows(live, model="lazy", timeout="0.2"), 503, seconds=True)
            assert "loading" in found["detail"]
            gate.set()
            assert [reply.result().status_code for reply in replies] == [200] * 5
        logged = [json.loads(line) for line in lines.getvalue().splitlines()]
        assert [line["message"] for line in logged if line.get("model") == "lazy"].count("a model is loaded") == 1
        assert states(live)["lazy"] == "ready"


def test_unload_finishes_the_queue(serve: Serve) -> None:
    """Unloading lets the model finish what was asked of it; whoever comes meanwhile is told when to come again."""
    with serve(configured(net("gated", "Gated"))) as live, ThreadPoolExecutor(2) as pool:
        with hold_model(live) as module:
            waits = pool.submit(post_rows, live, 2)
            wait_until(lambda: admitted_rows(live) == 3)
            unloading = pool.submit(live.client.post, "/models/gated/unload")
            wait_until(lambda: post_rows(live, 3, timeout="0.1").status_code == 503)
            live.engine.manager.handles["gated"].pace.add_decode(50.0, 1)  # so that a row takes 10 s
            refused = post_rows(live, 3)
            problem(refused, 503, seconds=True)
            assert int(refused.headers["retry-after"]) >= 30  # by the three rows that wait
            assert live.client.get("/livez").status_code == 200
        assert waits.result().status_code == 200
        assert unloading.result().json()["state"] == "available"
        assert module.forwards == [2]
        assert live.client.post("/models/gated/load").json()["state"] == "ready"
        assert post_rows(live, 4).status_code == 200
        assert gated_module(live) is not module


def test_room(serve: Serve) -> None:
    """No more models are loaded than may be: the lazy one that was not used for the longest time makes room."""
    names = ("a", "b", "c")
    specs = [net(name, "Gated", load="lazy") for name in names]
    with serve(configured(*specs, load="startup"), max_loaded_models=3) as live:
        for name, expected in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
            assert post_rows(live, model=name).status_code == 200
            assert [name for name in names if states(live)[name] == "ready"] == list(expected)
        assert states(live)["digits"] == "ready"
