"""API keys: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers

from layertap.models.errors import escape
from layertap.service.errors import ForbiddenError, KeyMissingError
from layertap.service.settings import LOOPBACK, Settings, split_key

if TYPE_CHECKING:
    from layertap.service.http.exchange import Exchange

OPEN_PATHS = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
READS = ("GET", "HEAD")
CROSS_SITE = "cross-site"  # a browser says so: it sends no key, but reaches what this machine alone does
BLANKS = b" \t"  # around a field's value they are none of it
MAX_PAGES = 64  # that are remembered
HINT = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


class Keyring:
    """The configured keys, and of a server without any the ``own_pages``, which were let in before."""

    def __init__(self, settings: Settings, pages: frozenset[str] = frozenset()) -> None:
        self._pages = pages  # the same in every installation, and a browser that opens one can send no key
        self._hosts = LOOPBACK | {settings.host, *settings.allowed_hosts}
        self._origins = frozenset(settings.cors_origins)
        # A key that is in both lists is an administrator's.
        callers = _list_callers(settings.api_keys, "key", False) | _list_callers(settings.admin_keys, "admin", True)
        self._callers = [(key.encode(), caller) for key, caller in callers.items()]
        self.own_pages: set[tuple[bytes | None, ...]] = set()

    def authorize(self, exchange: Exchange) -> None:
        """Find out who the caller is: whether an administrator, and the key's name if keys are configured.

        KeyMissingError where a key is asked for and none that is known is given. Without any configured key the server
        is reachable from this machine only, and whoever reaches it may do everything, but for pages of other sites that
        a browser there shows (ForbiddenError).
        """
        path = exchange.facts.path
        is_open = path in OPEN_PATHS or (path in self._pages and exchange.facts.method in READS)
        if not self._callers:
            if not is_open:
                self._check_page(exchange)
            exchange.admin = True
            return
        if is_open:
            return
        key = _read_key(exchange.head)
        if key is None:
            raise KeyMissingError("this server asks for an API key", hint=HINT)
        # Compare all keys, each in constant time, so that timing reveals nothing about them.
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, key)]
        if not found:
            raise KeyMissingError("this API key is not known", hint=HINT)
        exchange.admin, exchange.facts.key = found[0]

    def _check_page(self, exchange: Exchange) -> None:
        """ForbiddenError for what a page of another site asks, also one whose name now leads here (DNS rebinding)."""
        headers = Headers(raw=exchange.headers)
        for host in headers.getlist("host"):  # browsers always send one
            if _parse_host(f"//{host}") not in self._hosts:
                detail = f"{escape(host)} is no name of this server"
                raise ForbiddenError(detail, hint="set LAYERTAP_ALLOWED_HOSTS, or LAYERTAP_API_KEYS")
        origin = headers.get("origin")
        foreign = origin is not None and _parse_host(origin) not in self._hosts
        if origin not in self._origins and (foreign or headers.get("sec-fetch-site") == CROSS_SITE):
            hint = "name the page's origin in LAYERTAP_CORS_ORIGINS"
            raise ForbiddenError("a page of another site may not use this server", hint=hint)
        if exchange.page is not None and len(self.own_pages) < MAX_PAGES:
            self.own_pages.add(exchange.page)


async def require_admin(request: Request) -> None:
    """A dependency of routes: ForbiddenError unless the caller is an administrator."""
    if not request.scope["state"]["exchange"].admin:
        raise ForbiddenError("this key may not load or unload models", hint="use a key from LAYERTAP_ADMIN_KEYS")


def _list_callers(texts: tuple[str, ...], prefix: str, admin: bool) -> dict[str, tuple[bool, str]]:
    """Whether the caller with a key is an administrator, and the key's name, else its position in the list."""
    keys = map(split_key, texts)
    return {key: (admin, name or f"{prefix}-{place}") for place, (key, name) in enumerate(keys, 1)}


def _read_key(head: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = head.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip(BLANKS):
        return token.strip(BLANKS)
    key = head.get(b"x-api-key")
    return None if key is None else key.strip(BLANKS)


def _parse_host(url: str) -> str | None:
    """The host's name in an address, in small letters; None where there is none, or more than that and a port."""
    try:
        parts = urlsplit(url)
        plain = "@" not in parts.netloc and not parts.path
        return (parts.hostname or "").removesuffix(".") if plain else None
    except ValueError:
        return None
