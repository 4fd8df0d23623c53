"""The load tester: it sends what it should, when it should, and counts what comes back as the server does."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from email import message_from_bytes
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.load import Now, Options, Report, Sample, Scenario, ScenarioError, read, run
from bench.load.__main__ import main
from bench.load.options import Arrivals
from bench.load.report import Figuring, percentile
from bench.load.scenario import scenarios
from bench.load.schedule import drawn, schedule
from bench.load.timing import Entry, parse
from tests.server import Live, serving
from tests.service.gated_server import admitted_rows, gated_module, hold_model, wait_until
from tests.service.support import Json, configured, net

ROOT = Path(__file__).parents[2]
FILES = ROOT / "bench" / "scenarios"
NOWHERE = "http://127.0.0.1:1"
OPTIONS = Options(NOWHERE, requests=100)
PICTURE = {"picture": str(ROOT / "examples" / "digit.png")}
VECTOR = {"name": "vector", "weight": 3, "input": PICTURE, "layers": "pool", "pool": "flatten"}
BLOCKS = {"name": "blocks", "weight": 2, "input": PICTURE, "inputs": 3, "layers": ["block1", "block2"], "format": "npz"}
ROWS = {"name": "rows", "input": {"random": [3, 32, 32]}, "inputs": 4, "layers": "pool"}
BAD = {"name": "bad", "weight": 2, "input": {"bad": True}, "layers": "pool"}
UNKNOWN = {"name": "unknown", "input": PICTURE, "layers": "nowhere"}
GATED = {"name": "gated", "model": "gated", "input": {"random": [4]}, "layers": "linear"}
LOOPS: dict[str, Json] = {"closed": {"connections": 4}, "open": {"rate": 200.0}, "uniform": {"rate": 200.0}}
LOOPS["uniform"]["arrivals"] = "uniform"


@pytest.fixture(scope="module")
def clean() -> Iterator[None]:
    """Whoever runs the tests may have settings of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def live(clean: None) -> Iterator[Live]:
    with serving(configured(net("gated", "Gated"))) as live:
        yield live


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing waits and no hook is left, whatever clients did."""
    yield
    if "live" in request.fixturenames:
        live: Live = request.getfixturevalue("live")
        wait_until(lambda: admitted_rows(live) == 0)
        wait_until(lambda: live.client.get("/models/digits").json()["hooks"] == 0)


def of(*entries: Json) -> list[Scenario]:
    return scenarios(list(entries), ROOT)


def weights(chosen: list[Scenario]) -> list[float]:
    return [each.weight for each in chosen]


# What is sent when


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_same_seed_same_schedule(loop: Json) -> None:
    options = replace(OPTIONS, **loop)
    first, again = (list(schedule([3, 2, 1], options)) for _ in range(2))
    assert first == again
    assert len(first) == 100
    assert first != list(schedule([3, 2, 1], replace(options, seed=1)))
    assert [number for _, number in first] != [number for _, number in schedule([3, 2, 1], options, "warm-up")]


def test_loops_draw_the_same_scenarios() -> None:
    """Runs with one seed can be compared: only the moments differ."""
    drawn_by = [[number for _, number in schedule([3, 2], replace(OPTIONS, **loop))] for loop in LOOPS.values()]
    assert drawn_by[0] == drawn_by[1] == drawn_by[2]


def test_weights() -> None:
    counted = Counter(islice(drawn([6, 3, 1], "0"), 10_000))
    assert [round(counted[number] / 10_000, 1) for number in range(3)] == [0.6, 0.3, 0.1]


def test_uniform_arrivals() -> None:
    entries = list(schedule([1], replace(OPTIONS, rate=4.0, arrivals="uniform", requests=5)))
    assert entries == [(0.0, 0), (0.25, 0), (0.5, 0), (0.75, 0), (1.0, 0)]


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and standard deviation are both one over the rate."""
    moments = [moment for moment, _ in schedule([1], replace(OPTIONS, rate=50.0, requests=20_000))]
    gaps = np.diff([0.0, *moments])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("arrivals", ["poisson", "uniform"])
def test_seconds_bound_an_open_loop(arrivals: Arrivals) -> None:
    options = replace(OPTIONS, rate=100.0, arrivals=arrivals, requests=None, seconds=2.0)
    moments = [moment for moment, _ in schedule([1], options)]
    assert max(moments) < 2.0
    assert 150 < len(moments) < 250


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give requests or seconds"),
        ({"requests": 0}, "requests is 0"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": 1.0, "rate": 0.0}, "rate is 0.0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"requests": 1, "connections": 0}, "connections is 0"),
        ({"requests": 1, "warmup": -1}, "warmup is -1"),
        ({"requests": 1, "url": "127.0.0.1:8000"}, "should begin with http://"),
    ],
)
def test_senseless_options(options: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**{"url": NOWHERE, **options})


# Figures


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    ordered = np.sort(np.random.default_rng(count).random(count))
    for percent in (0, 1, 50, 90, 99, 100):
        expected = np.percentile(ordered, percent, method="inverted_cdf")
        assert percentile(ordered.tolist(), percent) == expected


def test_figures() -> None:
    """Every sample is counted once: as a status, as an error, or as a client that left."""
    figuring = Figuring(of(VECTOR, BLOCKS), replace(OPTIONS, allow=frozenset({429})), 2.0)
    samples = [
        *(Sample(0, seconds=number / 1000, status=200, size=10, timing="a;dur=1, b;dur=4") for number in range(1, 5)),
        Sample(1, seconds=0.1, status=200, size=60, timing='a;dur=3, cache;desc="hit"'),
        Sample(0, seconds=0.5, status=500),
        Sample(0, seconds=0.01, status=429, retry_after=True, timing="a;dur=100"),
        Sample(0, seconds=0.03, status=503),
        Sample(1, seconds=9.0, error="ReadError"),
        Sample(1, seconds=9.0),
    ]
    found = figuring.figures(samples, not_sent=7)
    assert (found.requests, found.not_sent, found.left, found.unexpected) == (10, 7, 1, 2)
    assert found.statuses == {200: 5, 429: 1, 500: 1, 503: 1}
    assert found.errors == {"ReadError": 1}
    assert (found.per_second, found.goodput, found.rows_per_second, found.bytes_per_second) == (5, 2.5, 3.5, 50)
    assert found.latency_ms is not None
    assert (found.latency_ms.p50, found.latency_ms.p90, found.latency_ms.max) == (3, 500, 500)
    assert found.refusal_ms is not None
    assert (found.refused, found.refused_with_retry_after) == (2, 1)
    assert (found.refusal_ms.p50, found.refusal_ms.max) == (10, 30)
    assert [(name, step.answers, step.median, step.p99) for name, step in found.steps.items()] == [
        ("a", 5, 1, 3),
        ("b", 4, 4, 4),
        ("cache: hit", 1, None, None),
    ]


def test_figures_of_nothing() -> None:
    found = Figuring(of(VECTOR), OPTIONS, 0.0).figures([], 0)
    assert (found.requests, found.per_second, found.latency_ms, found.refusal_ms, found.steps) == (0, 0, None, None, {})


@pytest.mark.parametrize(
    ("header", "entries"),
    [
        ("", []),
        ("total;dur=1.5", [Entry("total", 1.5)]),
        ("parse;dur=0.10, decode;dur=12", [Entry("parse", 0.1), Entry("decode", 12.0)]),
        ("miss,\tdb ; dur = 53 ", [Entry("miss"), Entry("db", 53.0)]),
        ('cache;desc="hit, \\"warm\\"; old";dur=3', [Entry("cache", 3.0, 'hit, "warm"; old')]),
        ("cache;desc=hit", [Entry("cache", None, "hit")]),
        ('a;dur="2.5", b;DUR=3', [Entry("a", 2.5), Entry("b", 3.0)]),
        ("a;dur=1;dur=2", [Entry("a", 1.0)]),
        ("a;dur=soon, b;dur=nan, c;dur", [Entry("a"), Entry("b"), Entry("c")]),
        (", ,;dur=1,a", [Entry("a")]),
        ('a;desc="never ends, b', [Entry("a", None, "never ends, b")]),
    ],
)
def test_server_timing(header: str, entries: list[Entry]) -> None:
    assert parse(header) == entries


# Scenarios


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": "pool"}, "scenario 1 (vector): layer: there is no such key: did you mean 'layers'?"),
        ({"xyz": 1}, "scenario 1 (vector): xyz: there is no such key: known are name, input, layers, weight, "),
        ({"input": {"pictures": "a.png"}}, "input.pictures: there is no such key: did you mean 'picture'?"),
        ({"input": {"picture": {"sice": [1, 1]}}}, "input.picture.sice: there is no such key: did you mean 'size'?"),
        ({"input": {}}, "input: give exactly one of 'picture', 'random' and 'bad'"),
        ({"input": {"bad": True, "random": [3]}}, "input: give exactly one of"),
        ({"input": {"bad": False}}, "input.bad: Input should be True"),
        ({"input": {"picture": {}}}, "input.picture: give a file, or {size: [WIDTH, HEIGHT], seed: 1}"),
        ({"input": {"picture": {"size": [1]}}}, "input.picture.size: these are too few values"),
        ({"input": {"picture": "nowhere.png"}}, "nowhere.png: No such file or directory"),
        ({"input": {"picture": "README.md"}}, "input.picture: the name 'README.md' is not that of a picture"),
        ({"input": "a.png"}, "input: this should be a mapping of keys to values"),
        ({"layers": []}, "layers: these are too few values"),
        ({"layers": None}, "layers.0: Input should be a valid string"),
        ({"weight": 0}, "weight: Input should be greater than 0"),
        ({"weight": ".inf"}, "weight: Input should be a valid number"),
        ({"inputs": 0}, "inputs: Input should be greater than or equal to 1"),
        ({"expect": 99}, "expect.0: Input should be greater than or equal to 100"),
        ({"expect": []}, "expect: these are too few values"),
        ({"leave_after": -1}, "leave_after: Input should be greater than 0"),
        ({"name": ""}, "name: String should have at least 1 character"),
    ],
)
def test_parsing_errors(tmp_path: Path, change: Json, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps([{**VECTOR, **change}]))
    with pytest.raises(ScenarioError) as found:
        read(file)
    assert str(found.value).startswith(f"{file}: scenario 1")
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this should be a list of scenarios"),
        ("scenarios: []", "this should be a list of scenarios"),
        ("- a", "scenario 1: this should be a mapping"),
        ("- {name: a, layers: b}", "scenario 1 (a): input: this is missing"),
        ("- [", "is not YAML"),
        ("- {name: a, layers: b, input: {bad: true}}\n" * 2, "two scenarios are called 'a'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as found:
        read(file)
    assert message in str(found.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"can't read .*No such file"):
        read(tmp_path / "s.yaml")


def test_query_and_headers() -> None:
    more = {"normalize": True, "priority": 2, "query": {"verify": False}, "headers": {"X-Request-Timeout": 5}}
    (found,) = of({**VECTOR, "layers": ["a#0", "b,c"], **more})
    assert found.query == "layers=a%230%2Cb%2Cc&pool=flatten&normalize=true&priority=2&verify=false"
    assert found.headers == {"Content-Type": "image/png", "X-Request-Timeout": "5"}
    assert (found.rows, found.weight, found.expect, found.leave_after) == (1, 3, frozenset({200}), None)


def test_bodies() -> None:
    """Each kind of body, read back by somebody else's reader."""
    size = {"picture": {"size": [64, 43], "seed": 5}}
    vector, blocks, rows, bad, drawn = of(VECTOR, BLOCKS, ROWS, BAD, {**VECTOR, "name": "x", "input": size})
    picture = (ROOT / "examples" / "digit.png").read_bytes()
    assert vector.content == picture
    head = f"Content-Type: {blocks.headers['Content-Type']}\r\n\r\n".encode()
    parts = message_from_bytes(head + blocks.content).get_payload()
    assert isinstance(parts, list)
    assert [part.get_payload(decode=True) for part in parts] == [picture] * 3  # type: ignore[union-attr]
    array = np.load(BytesIO(rows.content), allow_pickle=False)
    assert (array.shape, array.dtype, rows.rows) == ((4, 3, 32, 32), np.float32, 4)
    assert bad.headers == {"Content-Type": "image/jpeg"}
    assert bad.expect == {422}
    with Image.open(BytesIO(drawn.content)) as image:
        assert (image.size, image.format) == ((64, 43), "JPEG")


@pytest.mark.parametrize("file", sorted(FILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_example_files(file: Path) -> None:
    """They can be read, and say the same each time."""
    assert read(file) == read(file)


def test_shares_of_digits() -> None:
    """A fifth is bad, a tenth of the clients leaves."""
    found = read(FILES / "digits.yaml")
    total = sum(weights(found))
    assert sum(each.weight for each in found if each.expect == {422}) / total == pytest.approx(0.2)
    assert sum(each.weight for each in found if each.leave_after) / total == pytest.approx(0.1)


# Runs against a server


def served(caplog: pytest.LogCaptureFixture) -> Counter[int]:
    """The statuses that the server says it has answered ``POST /extract`` with."""
    fields = [record.fields for record in caplog.records if record.name == "layertap.access"]  # type: ignore[attr-defined]
    return Counter(each["status"] for each in fields if each["path"] == "/extract")


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_hundred_requests(live: Live, caplog: pytest.LogCaptureFixture, loop: Json) -> None:
    """What is counted is what the server has answered, and what the seed says was sent."""
    chosen = of(VECTOR, BLOCKS, ROWS, BAD, UNKNOWN)
    options = Options(live.url, requests=100, seconds=240.0, seed=4, **loop)
    with caplog.at_level(logging.INFO, "layertap.access"):
        report = run(chosen, options)
        wait_until(lambda: served(caplog).total() >= options.requests)  # a request is logged after its reply
    total = report.total
    sent = Counter(chosen[number].name for _, number in schedule(weights(chosen), options))
    assert {name: each.requests for name, each in report.scenarios.items()} == sent
    assert (total.requests, total.not_sent, total.left, total.errors) == (100, 0, 0, {})
    assert total.statuses == served(caplog)
    assert total.statuses == {200: sent["vector"] + sent["blocks"] + sent["rows"], 422: sent["bad"] + sent["unknown"]}
    assert total.unexpected == report.scenarios["unknown"].unexpected == sent["unknown"] > 0
    assert not report.ok
    rows = sent["vector"] + 3 * sent["blocks"] + 4 * sent["rows"]
    assert total.rows_per_second * report.elapsed_s == pytest.approx(rows, rel=0.01)
    assert total.goodput * report.elapsed_s == pytest.approx(100 - sent["unknown"], rel=0.01)
    assert {"parse", "decode", "queue", "forward", "total"} <= total.steps.keys()
    assert total.steps["total"].answers == 100
    assert total.steps["forward"].answers == total.statuses[200]
    assert (report.late_ms is None) == ("rate" not in loop)


@pytest.mark.parametrize("loop", [["--connections", "4"], ["--rate", "100"]], ids=["closed", "open"])
def test_example_of_digits(live: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path, loop: list[str]) -> None:
    """The example runs as it is; some clients leave, and all else is as expected."""
    file = tmp_path / "new" / "r.json"
    words = [str(FILES / "digits.yaml"), "--url", live.url, "--requests", "40", "--warmup", "3", *loop]
    assert main([*words, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert all(each.name in printed.out for each in read(FILES / "digits.yaml"))
    assert "Server-Timing" in printed.out
    assert printed.err == ""  # no progress where there is no terminal
    written = json.loads(file.read_text())
    total = written["results"]["total"]
    assert total["requests"] == 40 == sum(total["statuses"].values()) + total["left"]
    assert total["left"] == written["results"]["scenarios"]["leaves"]["left"]
    assert written["command"].startswith("python -m bench.load ")
    assert written["machine"]["cores"] == os.cpu_count()


def test_exit_status(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 where an answer is unexpected, unless its status is allowed."""
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps([VECTOR, UNKNOWN]))
    words = [str(file), "--url", live.url, "--requests", "20"]
    assert main(words) == 1
    assert main([*words, "--allow", "422"]) == 0
    assert main([*words, "--allow", "429"]) == 1
    assert "422 × " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", NOWHERE], "no answer from http://127.0.0.1:1: "),
        (["--url", "nowhere"], "the URL 'nowhere' should begin with http://"),
        (["--requests", "0"], "requests is 0"),
        (["--key-env", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY is not set"),
        (["--rate", "5", "--connections", "5"], "not allowed with argument"),
    ],
)
def test_commands_that_make_no_sense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(FILES / "digits.yaml"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_file_errors_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nowhere.yaml"])
    assert ended.value.code == 2
    assert "error: can't read nowhere.yaml" in capsys.readouterr().err


def test_key(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment, goes with every request and into no file."""
    file, results = tmp_path / "s.yaml", tmp_path / "r.json"
    file.write_text(json.dumps([VECTOR]))
    monkeypatch.setenv("KEY_OF_A_TEST", "open-sesame")
    with serving(configured(), api_keys=("open-sesame",)) as guarded:
        words = [str(file), "--url", guarded.url, "--requests", "3", "--json", str(results)]
        assert main(words) == 1
        assert json.loads(results.read_text())["results"]["total"]["statuses"] == {"401": 3}
        assert main([*words, "--key-env", "KEY_OF_A_TEST"]) == 0
    assert json.loads(results.read_text())["results"]["total"]["statuses"] == {"200": 3}
    assert "open-sesame" not in results.read_text()


def test_warmup_is_not_counted(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "layertap.access"):
        report = run(of(VECTOR), Options(live.url, requests=10, warmup=7))
        wait_until(lambda: served(caplog).total() >= 17)
    assert report.total.statuses == {200: 10}
    assert served(caplog) == {200: 17}


def test_clients_that_leave(live: Live) -> None:
    """They are counted as such, not as errors, and the connection is closed: the server hears of it."""
    with hold_model(live):
        report = run(of({**GATED, "leave_after": 0.05}), Options(live.url, requests=8, connections=4))
    assert (report.total.left, report.total.statuses, report.total.errors) == (8, {}, {})
    assert report.ok


@contextmanager
def running(scenario: Json, options: Options) -> Iterator[tuple[list[Now], Callable[[], Report]]]:
    """A run in a thread: what it has told so far, and its report, to be asked for after the block."""
    told: list[Now] = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, of(scenario), options, told.append)
        yield told, future.result


def test_refusals(clean: None) -> None:
    """Refusals have figures of their own; allowed ones are no fault, nor do they count as good."""
    with serving(configured(net("gated", "Gated")), max_queue_rows=64) as limited:
        options = Options(limited.url, requests=12, rate=500.0, allow=frozenset({429}))
        with running({**GATED, "inputs": 20}, options) as (told, report):
            with hold_model(limited):
                wait_until(lambda: bool(told) and told[-1].done + (admitted_rows(limited) - 1) // 20 == 12)
            found = report()
    total = found.total
    assert total.statuses.keys() == {200, 429}
    assert sum(total.statuses.values()) == 12
    assert total.refused == total.refused_with_retry_after == total.statuses[429]
    assert total.refusal_ms is not None
    assert total.latency_ms is not None
    assert found.ok
    assert total.goodput < total.per_second
    assert total.steps["total"].answers == total.statuses[200]


def test_most_in_flight(live: Live) -> None:
    """In open loop, what exceeds the bound is not sent, and is counted."""
    options = Options(live.url, requests=30, rate=1000.0, most_in_flight=3)
    with running(GATED, options) as (told, report):
        with hold_model(live):
            wait_until(lambda: bool(told) and told[-1].not_sent == 27)
        found = report()
    assert (found.total.requests, found.total.not_sent, found.total.statuses) == (3, 27, {200: 3})


def test_latency_counts_from_the_schedule(live: Live) -> None:
    """A server that stalls delays none of the following requests: all are under way before the first is answered."""
    options = Options(live.url, requests=20, rate=1000.0, arrivals="uniform")
    with running(GATED, options) as (_, report):
        with hold_model(live):
            wait_until(lambda: admitted_rows(live) == 21)
        found = report()
    assert found.total.statuses == {200: 20}
    assert found.total.latency_ms is not None
    assert found.late_ms is not None
    assert found.total.latency_ms.max >= found.late_ms.max


def test_nobody_listens() -> None:
    report = run(of(VECTOR), Options(NOWHERE, requests=3, connections=3))
    assert (report.total.requests, report.total.errors, report.total.statuses) == (3, {"ConnectError": 3}, {})
    assert not report.ok


def test_connections_that_break() -> None:
    """A server that hangs up is counted, by kind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(4):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1)

        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = run(of(VECTOR), Options(url, requests=4, connections=2))
        thread.join()
    assert sum(report.total.errors.values()) == report.total.requests == 4
    assert not report.ok


def test_interrupted(live: Live, tmp_path: Path) -> None:
    """Ctrl-C ends a run; what was done is printed and written."""
    file, results = tmp_path / "s.yaml", tmp_path / "r.json"
    file.write_text(json.dumps([GATED]))
    module = gated_module(live)
    module.forwards.clear()
    words = [sys.executable, "-m", "bench.load", file, "--url", live.url, "--seconds", "120", "--json", results]
    ignored = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # what shells run in the background inherits that
    try:
        process = subprocess.Popen(
            list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    with process:
        try:
            wait_until(lambda: len(module.forwards) >= 20 or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            out, notes = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, notes) == (0, "")
    assert "interrupted" in out
    assert "Load: " in out
    written = json.loads(results.read_text())["results"]
    assert written["interrupted"]
    assert written["total"]["statuses"].keys() == {"200"}
