"""The page at ``/docs``: whole, and all of it from this server. A browser opens it in ``tests/service/ui``."""

from __future__ import annotations

from html.parser import HTMLParser

import httpx

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.proxy import proxied

MEDIA_TYPES = {"script": "text/javascript", "link": "text/css"}


class Page(HTMLParser):
    """The scripts and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag in ("script", "style")
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [(tag, value) for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        if self._inside and data.strip():
            self.inline.append(data)
        self._inside = False


def whole(client: httpx.Client, address: str) -> None:
    """Whatever the page names is there, where it says, and no script stands in it."""
    reply = client.get(address)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    page = Page(reply.text)
    assert page.inline == []
    assert "//" not in reply.text
    files = [(tag, value) for tag, value in page.addresses if not value.startswith("data:")]
    assert sorted(tag for tag, _ in files) == ["link", "script", "script"]
    texts = []
    for tag, value in files:
        found = client.get(reply.url.join(value))
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(MEDIA_TYPES[tag])
        texts.append(found.text)
    assert any("SwaggerUIBundle({" in text and '"openapi.json"' in text for text in texts)
    assert client.get(reply.url.join("openapi.json")).json()["info"]["title"] == "layertap"


def test_page(live: Live) -> None:
    """All of the page comes from this server."""
    whole(live.client, "/docs")
    assert live.client.get("/redoc").status_code == 404
    assert live.client.get("/docs/").status_code == 404


def test_page_beneath_a_prefix(serve: Serve) -> None:
    """So does it beneath a prefix."""
    with (
        serve(root_path="/features") as live,
        proxied(live.url, "/features", strip=True) as url,
        httpx.Client() as client,
    ):
        whole(client, f"{url}/features/docs")


def test_policy(live: Live) -> None:
    """The browser is told to take scripts and styles from nowhere else, and to ask nobody else."""
    policies = ", ".join(live.client.get("/docs").headers.get_list("content-security-policy")).split(",")
    (policy,) = [each.strip() for each in policies if each.strip().startswith("default-src 'none'")]
    allowed = {words[0]: set(words[1:]) for words in (each.split() for each in policy.split(";"))}
    assert allowed["script-src"] == allowed["connect-src"] == {"'self'"}
    assert {source for sources in allowed.values() for source in sources} <= {"'self'", "'none'", "data:"}
