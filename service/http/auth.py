"""API keys: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import Request

from layertap.models.errors import escape
from layertap.service.errors import ForbiddenError, KeyMissingError
from layertap.service.settings import LOOPBACK, Settings, split_key

if TYPE_CHECKING:
    from layertap.service.http.exchange import Exchange

OPEN_PATHS = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
READS = ("GET", "HEAD")
CROSS_SITE = b"cross-site"  # by a browser, which sends no key but reaches servers that listen on loopback
BLANKS = b" \t"  # around a field's value
MAX_PAGES = 64  # that are remembered
HINT = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


class Keyring:
    """The configured keys. A server without any serves this machine only, but no pages of other sites."""

    def __init__(self, settings: Settings, pages: frozenset[str] = frozenset()) -> None:
        self._pages = pages  # the same in every installation, and a browser that opens one can send no key
        self._hosts = LOOPBACK | {settings.host, *settings.allowed_hosts}
        self._origins = frozenset(settings.cors_origins)
        # A key that is in both lists is an administrator's.
        callers = _list_callers(settings.api_keys, "key", False) | _list_callers(settings.admin_keys, "admin", True)
        self._callers = [(key.encode(), caller) for key, caller in callers.items()]
        self._check_page = lru_cache(MAX_PAGES)(self._check_any_page)

    def authorize(self, exchange: Exchange) -> None:
        """Note whether the caller is an administrator, and the key's name if keys are configured.

        KeyMissingError without a known key, if any is configured. Otherwise all callers are administrators, except
        pages of other sites in this machine's browser (ForbiddenError).
        """
        path, head = exchange.facts.path, exchange.head
        is_open = path in OPEN_PATHS or (path in self._pages and exchange.facts.method in READS)
        if not self._callers:
            if not is_open:
                self._check_page(head.get(b"host"), head.get(b"origin"), head.get(b"sec-fetch-site"))
            exchange.admin = True
            return
        if is_open:
            return
        key = _read_key(head)
        if key is None:
            raise KeyMissingError("this server asks for an API key", hint=HINT)
        # Compare all keys, each in constant time, so that timing reveals nothing about them.
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, key)]
        if not found:
            raise KeyMissingError("this API key is not known", hint=HINT)
        exchange.admin, exchange.facts.key = found[0]

    def _check_any_page(self, host: bytes | None, origin: bytes | None, site: bytes | None) -> None:
        """ForbiddenError for a page of another site, including one whose name now leads here (DNS rebinding)."""
        if host is not None and _parse_host(b"//" + host) not in self._hosts:  # browsers always send one
            detail = f"{escape(host.decode('latin-1'))} is no name of this server"
            raise ForbiddenError(detail, hint="set LAYERTAP_ALLOWED_HOSTS, or LAYERTAP_API_KEYS")
        foreign = origin is not None and _parse_host(origin) not in self._hosts
        if (origin or b"").decode("latin-1") not in self._origins and (foreign or site == CROSS_SITE):
            hint = "name the page's origin in LAYERTAP_CORS_ORIGINS"
            raise ForbiddenError("a page of another site may not use this server", hint=hint)


async def require_admin(request: Request) -> None:
    """A dependency of routes: ForbiddenError unless the caller is an administrator."""
    if not request.scope["state"]["exchange"].admin:
        raise ForbiddenError("this key is no administrator's", hint="use a key from LAYERTAP_ADMIN_KEYS")


def _list_callers(texts: tuple[str, ...], prefix: str, admin: bool) -> dict[str, tuple[bool, str]]:
    """By key: whether the caller is an administrator, and the key's name, by default its position in the list."""
    keys = map(split_key, texts)
    return {key: (admin, name or f"{prefix}-{number}") for number, (key, name) in enumerate(keys, 1)}


def _read_key(head: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = head.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip(BLANKS):
        return token.strip(BLANKS)
    key = head.get(b"x-api-key")
    return None if key is None else key.strip(BLANKS)


def _parse_host(url: bytes) -> str | None:
    """The host in a URL, in small letters; None if there is anything but a host and a port."""
    try:
        parts = urlsplit(url.decode("latin-1"))
        plain = "@" not in parts.netloc and not parts.path
        return (parts.hostname or "").removesuffix(".") if plain else None
    except ValueError:
        return None
