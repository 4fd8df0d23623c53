"""API keys: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from fastapi import Request
from starlette.datastructures import Headers

from service.errors import ForbiddenError, KeyMissingError
from service.settings import Settings

OPEN_PATHS = frozenset({"/livez", "/readyz"})
HINT = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


def authorize(path: str, headers: Headers, settings: Settings) -> bool:
    """Whether the caller is an administrator; KeyMissingError where a key is asked for and none that is known is given.

    Without any configured key the server is reachable from this machine only, and whoever reaches it may do everything.
    """
    if not settings.guarded:
        return True
    if path in OPEN_PATHS:
        return False
    key = _key(headers)
    if key is None:
        raise KeyMissingError("this server asks for an API key", hint=HINT)
    admin, user = _among(key, settings.admin_keys), _among(key, settings.api_keys)
    if not (admin or user):
        raise KeyMissingError("this API key is not known", hint=HINT)
    return admin


def admin_only(request: Request) -> None:
    """ForbiddenError unless the caller is an administrator."""
    if not request.scope["state"]["admin"]:
        raise ForbiddenError("this key may not load or unload models", hint="use a key from LAYERTAP_ADMIN_KEYS")


def _key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


def _among(key: str, known: Iterable[str]) -> bool:
    # Every key is compared, each in constant time: how long it takes tells nothing.
    given = key.encode("utf-8", "surrogateescape")
    return sum(hmac.compare_digest(given, each.encode()) for each in known) > 0
