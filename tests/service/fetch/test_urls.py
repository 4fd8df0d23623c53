"""Pictures at URLs: the same features as sent, from named hosts only, and whatever a host does harms nobody."""

from __future__ import annotations

import math
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layertap.models.errors import InputError
from layertap.models.spec import InputSpec, PreprocessSpec
from layertap.service.fetch.addresses import is_allowed
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.settings import Settings, SettingsError
from tests.server import Live
from tests.service import hostile_server as answers
from tests.service import support
from tests.service.bad_urls import FORBIDDEN, FORMS, OWN, PUBLIC
from tests.service.conftest import Serve
from tests.service.gated_server import admitted_rows, connect, encode_request, wait_until
from tests.service.hostile_server import PNG, HostileServer, run_hostile_server
from tests.service.support import Control, Json, arrays_of, configured, image, net, picture, problem, same

# Answers that go on for ever without a pause between their parts: only the time that a fetch has ends them.
UNENDING = ("/informed", "/extensions")
WHOLE: Json = {"layers": ["block2", "head"], "pool": "mean"}
LOOPBACK = "127.0.0.1"
COULD_NOT = "the URL could not be fetched"


class Names:
    """A resolver that knows some names, takes every other one for this machine, and remembers what it was asked."""

    def __init__(self) -> None:
        self.known: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host: the next of its answers, at the end the last one again and again."""
        self.asked.append(host)
        answers = self.known.get(host, [[LOOPBACK]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


BRIGHT = PreprocessSpec(resize=8, crop=8, std=(0.001, 0.001, 0.001))


class Forked(nn.Module):
    """Goes one way for noise, as at loading, and another for pictures, whose numbers are large."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.dim, self.bright = (nn.Linear(192, 192) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        bright = image.flatten(1).mean(1) > 50
        rows = self.both(image.flatten(1))
        out = torch.zeros_like(rows)
        for chosen, way in ((~bright, self.dim), (bright, self.bright)):
            if chosen.any():
                out[chosen] = way(rows[chosen])
        return out


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileServer]:
    """A server that counts who comes, on all of this machine's loopback addresses that tests speak of."""
    with run_hostile_server((LOOPBACK, "::1")) as hostile:
        yield hostile


@pytest.fixture(scope="module")
def other() -> Iterator[HostileServer]:
    """Where nobody is to come."""
    with run_hostile_server((LOOPBACK, "127.0.0.2")) as hostile:
        yield hostile


@pytest.fixture(scope="module")
def names() -> Names:
    """The resolver of ``fetching``."""
    return Names()


@pytest.fixture(scope="module")
def fetching(serve: Serve, hostile: HostileServer, other: HostileServer, names: Names) -> Iterator[Live]:
    """A server that may fetch from a hostile one under some names, elsewhere only from public addresses."""
    hostile.elsewhere = f"http://{LOOPBACK}:{other.port}/good.png"
    private = [f"images.test:{hostile.port}", f"{LOOPBACK}:{hostile.port}", f"[::1]:{hostile.port}"]
    private += [f"images.test:{other.port}"]
    public = ["images.test", f"*.outside.test:{hostile.port}", f"outside.test:{hostile.port}", "metadata.test"]
    settings = {
        "allow_urls": ",".join(private + public),
        "allow_private_urls": ",".join(private),
        "max_body_bytes": 2_000_000,
        "url_timeout_s": 20,
    }
    forked = net("forked", "Forked", InputSpec("image", (3, 8, 8)), module=__name__, preprocess=BRIGHT)
    with serve(configured(net("gated", "Gated"), forked), fetcher=partial(Fetcher, resolver=names), **settings) as live:
        yield live


@pytest.fixture(scope="module")
def control(fetching: Live) -> Control:
    """A good request without URLs."""
    return support.control(fetching)


@pytest.fixture(autouse=True)
def _counted(hostile: HostileServer, other: HostileServer, names: Names) -> Iterator[None]:
    """Each test counts from none and knows no names, and afterwards no connection is left open."""
    hostile.forget()
    other.forget()
    names.asked.clear()
    names.known.clear()
    yield
    wait_until(lambda: hostile.under_way == other.under_way == 0)


def body(*urls: str, **more: object) -> Json:
    """A request for pictures at URLs."""
    return {"json": {**WHOLE, "inputs": [{"url": url} for url in urls], **more}}


def refused(live: Live, url: str) -> Json:
    """The error that a URL gets: of its input, and without anything that is in it or that was looked up."""
    reply = live.client.post("/extract", **body(url))
    found = problem(reply, 422)
    assert (found["errors"][0]["input"], found["errors"][0]["pointer"]) == (0, "/inputs/0")
    assert not [each for each in ("127.", "169.254", "::", ".test", "hostile") if each in reply.text]
    wait_until(lambda: live.engine.admission.used_bytes == 0)  # given back once the reply is sent
    return found


@pytest.mark.parametrize("path", [*answers.GOOD, ""])
def test_good(fetching: Live, hostile: HostileServer, path: str) -> None:
    """A picture at a URL has the features that it has when it is sent, by one connection."""
    reply = fetching.client.post("/extract", **body(f"http://images.test:{hostile.port}{path}"))
    sent = fetching.client.post("/extract", json={**WHOLE, "inputs": [image(PNG)]})
    assert same(arrays_of(reply), arrays_of(sent))
    assert reply.headers["x-layertap-fingerprint"] == sent.headers["x-layertap-fingerprint"]
    assert "fetch;" in reply.headers["server-timing"]
    assert "fetch;" not in sent.headers["server-timing"]
    assert hostile.hits == 1


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://images.test:{port}", "GET / HTTP/1.1", "images.test:{port}"),
        ("HTTP://IMAGES.test:{port}/?a=b/c?&d=%20", "GET /?a=b/c?&d=%20 HTTP/1.1", "images.test:{port}"),
        ("http://127.0.0.1:{port}/good.png", "GET /good.png HTTP/1.1", "127.0.0.1:{port}"),
        ("http://[::1]:{port}/good.png?@x:y", "GET /good.png?@x:y HTTP/1.1", "[::1]:{port}"),
    ],
)
def test_what_is_asked(fetching: Live, hostile: HostileServer, names: Names, url: str, line: str, host: str) -> None:
    """The request names the host, wants the bytes as they are, and brings along nothing of the server's."""
    names.known["::1"] = [["::1"]]
    reply = fetching.client.post("/extract", **body(url.format(port=hostile.port)))
    assert reply.status_code == 200, reply.text
    first, *lines = hostile.heads[0].decode().strip().split("\r\n")
    headers = dict(each.lower().split(": ") for each in lines)
    assert (first, headers.pop("host")) == (line, host.format(port=hostile.port))
    assert headers["accept-encoding"] == "identity"
    assert set(headers) == {"user-agent", "accept", "accept-encoding", "connection"}


def test_no_proxies(
    fetching: Live, hostile: HostileServer, other: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies that the environment names are not asked."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://{LOOPBACK}:{other.port}")
        monkeypatch.setenv(name.upper(), f"http://{LOOPBACK}:{other.port}")
    assert fetching.client.post("/extract", **body(f"http://images.test:{hostile.port}/good.png")).status_code == 200
    assert (hostile.hits, other.hits) == (1, 0)


def test_among_others(fetching: Live, hostile: HostileServer) -> None:
    """URLs and pictures mix, in their order; with ``skip`` those that can't be had are left out and named."""
    base, mine = f"http://images.test:{hostile.port}", picture(3)
    inputs = [image(mine), {"url": f"{base}/good.png"}, {"url": f"{base}/missing"}, {"url": "http://elsewhere/"}]
    inputs += [{"url": f"{base}/text"}, image(mine), {"url": f"{base}/announced"}]
    reply = fetching.client.post("/extract", json={**WHOLE, "inputs": inputs, "on_error": "skip"})
    assert reply.json()["rows"] == 3
    assert [error["input"] for error in reply.json()["errors"]] == [2, 3, 4, 6]
    sent = fetching.client.post("/extract", json={**WHOLE, "inputs": [image(mine), image(PNG), image(mine)]})
    assert same(arrays_of(reply), arrays_of(sent))


def test_once_for_all_that_name_it(fetching: Live, hostile: HostileServer) -> None:
    """Inputs that stand for one at a URL are fetched with it."""
    inputs = [{"url": f"http://images.test:{hostile.port}/good.png"}, {"input": 0}, {"input": 0}]
    reply = fetching.client.post("/extract", json={**WHOLE, "inputs": inputs})
    sent = fetching.client.post("/extract", json={**WHOLE, "inputs": [image(PNG)] * 3})
    assert same(arrays_of(reply), arrays_of(sent))
    assert hostile.hits == 1


def test_once_however_often_it_is_planned(fetching: Live, hostile: HostileServer) -> None:
    """A request that is planned again without what its picture does not have keeps the picture that it fetched."""
    asked = {"model": "forked", "layers": ["*"]}
    url = f"http://images.test:{hostile.port}/good.png"
    reply = fetching.client.post("/extract", json={**asked, "inputs": [{"url": url}]})
    found = arrays_of(reply)
    assert "both" in found
    assert "dim" not in found
    assert same(found, arrays_of(fetching.client.post("/extract", json={**asked, "inputs": [image(PNG)]})))
    assert hostile.hits == 1


@pytest.mark.parametrize("path", ["/explain", "/extract"])
def test_pictures_of_pictures(fetching: Live, hostile: HostileServer, path: str) -> None:
    """Of a picture at a URL the same is drawn as of one that was sent; it is fetched once, where it is not refused."""
    base = f"http://images.test:{hostile.port}"
    asked: Json = {"method": "saliency"} if path == "/explain" else {"layers": ["block1"]}
    inputs = [{"url": f"{base}/missing"}, {"url": f"{base}/good.png"}]
    before = hostile.hits
    reply = fetching.client.post(f"{path}?format=png", json=asked | {"inputs": inputs, "on_error": "skip"})
    assert hostile.hits - before == 2
    assert reply.headers["x-layertap-skipped"] == "0"
    sent = fetching.client.post(f"{path}?format=png", json=asked | {"inputs": [image(PNG)]})
    assert reply.content == sent.content
    problem(fetching.client.post(f"{path}?format=png", json=asked | {"inputs": inputs}), 422)
    before = hostile.hits
    wrong = {"method": "saliency", "classes": [99]} if path == "/explain" else {"layers": ["blok"]}
    problem(fetching.client.post(f"{path}?format=png", json=wrong | {"inputs": inputs[1:]}), 422)
    assert hostile.hits == before


def test_system_resolver(serve: Serve, hostile: HostileServer) -> None:
    """Names are looked up by the system where nothing else is said."""
    host = f"localhost:{hostile.port}"
    with serve(allow_urls=host, allow_private_urls=host) as live:
        assert live.client.post("/extract", **body(f"http://{host}/good.png")).status_code == 200
        problem(live.client.post("/extract", **body(f"http://{LOOPBACK}:{hostile.port}/good.png")), 422)
    assert hostile.hits == 1


@pytest.mark.parametrize("form", FORMS, ids=ascii)
def test_forms(fetching: Live, hostile: HostileServer, names: Names, form: str) -> None:
    """However another host is written, or an allowed one is written oddly, nobody is asked and nobody dialled."""
    refused(fetching, re.sub(r":1(?=[/\\#])", f":{hostile.port}", form))
    assert (names.asked, hostile.hits) == ([], 0)


def test_off(serve: Serve, hostile: HostileServer) -> None:
    """Without hosts in the settings nothing is fetched."""
    with serve() as live:
        for host in (LOOPBACK, "localhost", "[::1]"):
            found = refused(live, f"http://{host}:{hostile.port}/good.png")
            assert "off" in found["detail"]
    assert hostile.hits == 0


def test_before_anything_is_asked(fetching: Live, hostile: HostileServer) -> None:
    """Where one input can't be had, a layer is unknown, or a model takes no pictures, nobody is asked for the rest."""
    good = f"http://images.test:{hostile.port}/good.png"
    found = problem(fetching.client.post("/extract", **body(good, "http://elsewhere.test/", good)), 422)
    assert [error["input"] for error in found["errors"]] == [1]
    problem(fetching.client.post("/extract", **body(good, layers=["nowhere"])), 422)
    problem(fetching.client.post("/extract", **body(good, model="nowhere")), 404)
    tensors = problem(fetching.client.post("/extract", **body(good, model="gated", layers=["linear"])), 422)
    assert "tensors" in tensors["detail"]
    assert hostile.hits == 0


def test_addresses() -> None:
    """Public addresses may be dialled; with leave those of one's own network as well, and no others."""
    assert [each for each in FORBIDDEN if is_allowed(ip_address(each), private=False)] == []
    assert [each for each in FORBIDDEN if is_allowed(ip_address(each), private=True) != (each in OWN)] == []
    assert all(is_allowed(ip_address(each), private) for each in PUBLIC for private in (False, True))


METADATA = "169.254.169.254"
HOSTS = [
    *(("a.outside.test", [each]) for each in (LOOPBACK, "10.0.0.1", METADATA, "::ffff:127.0.0.1", "fd00:ec2::254")),
    *(("a.outside.test", answer) for answer in ([PUBLIC[0], LOOPBACK], [LOOPBACK, PUBLIC[0]])),
    *(("images.test", answer) for answer in ([METADATA], [LOOPBACK, METADATA], ["::ffff:127.0.0.1"], [])),
]


@pytest.mark.parametrize(("host", "answer"), HOSTS)
def test_forbidden_addresses(
    fetching: Live, hostile: HostileServer, names: Names, host: str, answer: list[str]
) -> None:
    """A host is not fetched from where any of its addresses is not public; one that may be private not at just any."""
    names.known[host] = [answer]
    assert refused(fetching, f"http://{host}:{hostile.port}/good.png")["detail"] == COULD_NOT
    assert (names.asked, hostile.hits) == ([host], 0)


def test_private_port_only(fetching: Live) -> None:
    """A host that may be private at one port may not be at another."""
    assert refused(fetching, "http://images.test/good.png")["detail"] == COULD_NOT


def test_rebinding(fetching: Live, other: HostileServer, names: Names) -> None:
    """A name is looked up once for a fetch: an answer that changes afterwards changes nothing."""
    names.known["images.test"] = [[LOOPBACK], ["127.0.0.2"], ["169.254.169.254"], [LOOPBACK]]
    url = f"http://images.test:{other.port}/good.png"
    assert fetching.client.post("/extract", **body(url)).status_code == 200
    assert len(names.asked) == 1
    assert fetching.client.post("/extract", **body(url)).status_code == 200
    refused(fetching, url)
    assert names.asked == ["images.test"] * 3
    assert other.hits == 2


def test_next_address(fetching: Live, other: HostileServer, names: Names) -> None:
    """Where the first address does not answer the next one is dialled."""
    names.known["images.test"] = [["127.0.0.3", "::1", LOOPBACK]]
    reply = fetching.client.post("/extract", **body(f"http://images.test:{other.port}/good.png"))
    assert reply.status_code == 200
    assert other.hits == 1


def test_one_answer_for_all(
    fetching: Live, hostile: HostileServer, other: HostileServer, names: Names, control: Control
) -> None:
    """Whatever goes wrong in the network, the answer is the same: nobody learns what is there, nor what was asked."""
    found = {}
    for path in answers.FAILING.keys() - UNENDING:
        hostile.forget()
        found[path] = refused(fetching, f"http://images.test:{hostile.port}{path}")
        assert hostile.hits == 1, path
    names.known["gone.outside.test"] = [[]]
    found["no address"] = refused(fetching, f"http://gone.outside.test:{hostile.port}/")
    found["private"] = refused(fetching, f"http://private.outside.test:{hostile.port}/")
    names.known["images.test"] = [["127.0.0.4"]]
    found["refused"] = refused(fetching, f"http://images.test:{hostile.port}/")
    del names.known["images.test"]
    found["tls"] = refused(fetching, f"https://images.test:{hostile.port}/good.png")
    assert {error.pop("request_id") for error in found.values()}
    assert {path: error for path, error in found.items() if error != found["/missing"]} == {}
    assert found["/missing"]["detail"] == COULD_NOT
    assert other.hits == 0
    control.check()


@pytest.mark.parametrize("path", answers.UNFIT)
def test_no_picture(fetching: Live, hostile: HostileServer, path: str) -> None:
    """What was fetched is decoded as if it had been sent: by its bytes."""
    found = refused(fetching, f"http://images.test:{hostile.port}{path}")
    sent = problem(fetching.client.post("/extract", json={**WHOLE, "inputs": [image(b"<p>secret</p>")]}), 422)
    assert path == "/half" or found["detail"] == sent["detail"]


@pytest.mark.parametrize("path", answers.LARGE)
def test_too_large(fetching: Live, hostile: HostileServer, path: str, control: Control) -> None:
    """What is longer than a body may be is given up as soon as that is known: 413, with the limit."""
    reply = fetching.client.post("/extract", **body(f"http://images.test:{hostile.port}{path}"))
    found = problem(reply, 413)
    assert "2000000" in found["detail"]
    assert found["errors"][0]["input"] == 0
    assert fetching.engine.admission.used_bytes == 0
    control.check()


def test_too_large_together(serve: Serve, hostile: HostileServer) -> None:
    """The limit is of all URLs of a request together."""
    host = f"{LOOPBACK}:{hostile.port}"
    with serve(allow_urls=host, allow_private_urls=host, max_body_bytes=3 * len(PNG)) as live:
        good = f"http://{host}/good.png"
        assert live.client.post("/extract", **body(good, good, good)).status_code == 200
        problem(live.client.post("/extract", **body(good, good, good, good)), 413)


def test_queue_bytes(serve: Serve, hostile: HostileServer) -> None:
    """What is fetched counts among the bytes that the queue holds, and is given back."""
    host = f"{LOOPBACK}:{hostile.port}"
    with serve(allow_urls=host, allow_private_urls=host, max_queue_bytes=300_000) as live:
        problem(live.client.post("/extract", **body(f"http://{host}/endless")), 413)
        wait_until(lambda: live.engine.admission.used_bytes == 0)  # it is given back once the reply is sent
        with live.engine.admission.admit(math.inf) as ticket:
            ticket.reserve_bytes(299_000)
            reply = live.client.post("/extract", **body(f"http://{host}/endless", f"http://{host}/gate"))
            problem(reply, 429, seconds=True)
        assert live.engine.admission.used_bytes == 0
        assert live.client.post("/extract", **body(f"http://{host}/good.png")).status_code == 200


@pytest.fixture(scope="module")
def hasty(serve: Serve, hostile: HostileServer) -> Iterator[Live]:
    """A server that waits for no host."""
    host = f"{LOOPBACK}:{hostile.port}"
    settings = {"allow_urls": host, "allow_private_urls": host, "url_timeout_s": 0.3}
    with serve(**settings) as live:
        yield live


@pytest.mark.parametrize("path", [*answers.SLOW, *UNENDING])
def test_slow(hasty: Live, hostile: HostileServer, path: str) -> None:
    """A host that goes on for ever, however slowly, is left, and its connection with it."""
    assert refused(hasty, f"http://{LOOPBACK}:{hostile.port}{path}")["detail"] == COULD_NOT
    wait_until(hostile.gone.is_set)


def test_handshake_that_never_ends(hasty: Live, hostile: HostileServer) -> None:
    """A host that says nothing when it is asked for TLS is left as well."""
    hostile.mute = True
    try:
        assert refused(hasty, f"https://{LOOPBACK}:{hostile.port}/")["detail"] == COULD_NOT
        wait_until(hostile.gone.is_set)
    finally:
        hostile.mute = False


def test_deadline(fetching: Live, hostile: HostileServer) -> None:
    """The request's own deadline ends a fetch: 504."""
    asked = body(f"http://images.test:{hostile.port}/slow")
    problem(fetching.client.post("/extract", headers={"x-request-timeout": "0.3"}, **asked), 504, seconds=True)
    wait_until(lambda: hostile.under_way == 0)


def test_client_that_leaves(fetching: Live, hostile: HostileServer) -> None:
    """A client that goes away takes its fetches along."""
    request = fetching.client.build_request("POST", "/extract", **body(f"http://images.test:{hostile.port}/slow"))
    with connect(fetching) as connection:
        connection.sendall(encode_request(request))
        wait_until(lambda: len(hostile.heads) == 1)  # a fetch that is only connected asks for nothing any more
    wait_until(hostile.gone.is_set)


@pytest.mark.parametrize(("settings", "most"), [({"max_url_fetches": 2}, 2), ({}, 8)])
def test_few_at_once(serve: Serve, hostile: HostileServer, settings: Json, most: int) -> None:
    """So many fetches are under way at once as may be, and a request has eight; others wait, and are answered."""
    host = f"{LOOPBACK}:{hostile.port}"
    hostile.gate.clear()
    with serve(allow_urls=host, allow_private_urls=host, **settings) as live, ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(live.client.post, "/extract", **body(*[f"http://{host}/gate"] * 20))
            wait_until(lambda: hostile.under_way == most)
            assert live.client.get("/readyz").status_code == 200  # time for more to come, if they may
            assert admitted_rows(live) == 1
            assert hostile.hits == most
        finally:
            hostile.gate.set()
        assert asked.result().status_code == 200
    assert hostile.hits == 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for images.test, signed by itself."""
    openssl = shutil.which("openssl") or pytest.skip("there is no openssl")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    names = ("-subj", "/CN=images.test", "-addext", "subjectAltName=DNS:images.test")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(file))
    subprocess.run(
        [openssl, "req", "-x509", "-days", "2", *key, *names, "-out", f"{file}.crt"], check=True, capture_output=True
    )
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


def test_tls(serve: Serve, names: Names, certificate: Path) -> None:
    """Over TLS the host is named and its certificate checked, though it is an address that is dialled."""
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=f"{certificate}.crt")
    with ExitStack() as stack:
        hostile = stack.enter_context(run_hostile_server((LOOPBACK,), own))
        hosts = ",".join(f"{host}:{hostile.port}" for host in ("images.test", "others.test", LOOPBACK))
        allowed = {"allow_urls": hosts, "allow_private_urls": hosts}
        trusts: Mapping[str, ssl.SSLContext | None] = {"own": trusting, "system": None}
        lives = {
            name: stack.enter_context(serve(fetcher=partial(Fetcher, resolver=names, tls=tls), **allowed))
            for name, tls in trusts.items()
        }
        url = "https://{}:" + f"{hostile.port}/good.png"
        reply = lives["own"].client.post("/extract", **body(url.format("images.test")))
        sent = lives["own"].client.post("/extract", json={**WHOLE, "inputs": [image(PNG)]})
        assert same(arrays_of(reply), arrays_of(sent))
        assert hostile.names == ["images.test"]
        assert len(hostile.heads) == 1
        for live, host in (("own", "others.test"), ("own", LOOPBACK), ("system", "images.test")):
            assert refused(lives[live], url.format(host))["detail"] == COULD_NOT
        assert (hostile.hits, len(hostile.heads)) == (4, 1)
        assert refused(lives["own"], url.format("images.test").replace("https", "http"))["detail"] == COULD_NOT


@pytest.mark.parametrize(
    "entry",
    [
        *("*", "*.", "*.org", "*.*.org", "a.*.org", "http://a.org", "a.org/", "a.org:", "a.org:0", "a.org:99999"),
        *("127.1", "0x7f.0.0.1", "0177.0.0.1", "2130706433", "0x7f000001", "a.0x7f", "[::ffff:0:0:1]:80x"),
        *("[0:0:0:0:0:0:0:1]", "::1", "[::1", "[1.2.3.4]", "bücher.org", "a.org.", ".a.org", "a..org", "-a.org"),
        *("a b.org", "user@a.org", "*.127.0.0.1", "*.[::1]", "a" * 64 + ".org"),
    ],
)
def test_bad_hosts(entry: str) -> None:
    """A setting that names no host, or one that a resolver may take for a number, keeps the server from starting."""
    with pytest.raises(SettingsError, match="is not a host"):
        Fetcher(Settings(allow_urls=(entry,)))


@pytest.mark.parametrize("private", ["b.org", "a.org", "a.org:81", "*.c.org", "x.c.org"])
def test_bad_private_hosts(private: str) -> None:
    """Only a single host that is allowed may be private, at the same port."""
    with pytest.raises(SettingsError, match="LAYERTAP_ALLOW_PRIVATE_URLS"):
        Fetcher(Settings(allow_urls="a.org:80, *.c.org", allow_private_urls=private))


def test_below(names: Names) -> None:
    """A star stands for one or more labels, a host without a port for that of the scheme."""
    fetcher = Fetcher(Settings(allow_urls="*.a.org, B.org, c.org:8080"), resolver=names)
    for url, port in (
        *(("http://x.a.org", 80), ("https://x.y.a.org/", 443), ("https://b.ORG:443/", 443), ("http://b.org:80?x", 80)),
        *(("http://c.org:8080/", 8080), ("https://c.org:8080/", 8080)),
    ):
        assert fetcher.parse_url(url).port == port
    for url in ("http://a.org/", "http://b.org:443/", "https://b.org:80/", "http://c.org/", "http://x.b.org/"):
        with pytest.raises(InputError):
            fetcher.parse_url(url)
