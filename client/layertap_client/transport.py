"""Arguments for httpx's clients and requests, and the translation of its errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.request import proxy_bypass

import httpx

from layertap_client.errors import ConnectionFailedError, InputError, ReplyTimeoutError
from layertap_client.messages import Send

URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "LAYERTAP_API_KEY"
MAX_CONNECT_S = 10.0
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})  # variables that httpx reads
OWN_WAY = frozenset({"proxy", "transport", "mounts", "trust_env"})  # options of who chooses the way himself
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

T = TypeVar("T")


def check_address(url: str) -> None:
    """InputError where no server can be there: httpx would say so at the first call, and that would be tried again."""
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InputError(f"{url!r} is no address of a server: {error}") from error
    if address.scheme not in ("http", "https") or not address.host or not 0 < (address.port or 80) < 2**16:
        raise InputError(f"{url!r} is no address of a server: write one like {URL!r}")
    if address.path.rstrip("/").endswith(("/v1", "/v2")):
        raise InputError(f"{url!r} is for other clients: write it without {address.path.rstrip('/')[-3:]}")


def make_options(url: str, api_key: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of httpx's clients; InputError for an address or a key that can't be right."""
    check_address(url)
    # Replies are numbers, which hardly shrink: compressing them would take longer than sending them.
    headers = {"Accept-Encoding": "identity", **(given.pop("headers", None) or {})}
    headers |= make_key_header(api_key)
    if _is_loopback(httpx.URL(url).host) and not OWN_WAY & given.keys():  # no proxy leads to this machine
        given = {"verify": httpx.create_ssl_context(), **given, "trust_env": False}
    return {"base_url": url, "headers": headers, **given}


def make_http(make: Callable[..., T], options: Mapping[str, Any]) -> T:
    """A client of httpx; InputError for a proxy of the environment that httpx can't use."""
    try:
        return make(**options)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        variables = [name for name, value in os.environ.items() if name.lower() in PROXIES and value]
        if OWN_WAY & options.keys() or not variables:
            raise
        raise InputError(f"{', '.join(variables)} can't be used: {error}; NO_PROXY=* goes without a proxy") from error


def find_proxy(options: Mapping[str, Any]) -> str:
    """The variable of the environment that has the proxy to the server of a client's options; "" where none has."""
    url = httpx.URL(options["base_url"])
    if OWN_WAY & options.keys() or proxy_bypass(url.host):
        return ""
    names = (f"{url.scheme}_proxy", "all_proxy")
    return next((name for each in names for name in (each, each.upper()) if os.environ.get(name)), "")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").rpartition(".")[2] == "localhost"


def make_key_header(api_key: str | None = None) -> dict[str, str]:
    """The header of a key, by default that of the environment, if there is one; InputError for what no key can be."""
    key = (os.environ.get(KEY_VARIABLE) or None) if api_key is None else str(api_key)
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()) or key != key.strip() or not key:
        source = KEY_VARIABLE if api_key is None else "the API key"
        raise InputError(f"{source} is empty, or has blanks, line breaks or other characters that no key can have")
    return {"Authorization": f"Bearer {key}"}


def make_arguments(step: Send) -> dict[str, Any]:
    """The arguments of httpx's ``stream``."""
    request, seconds = step.request, step.silence_s
    return {
        "method": request.method,
        "url": request.path,
        "params": list(request.params) or None,
        "headers": dict(request.headers),
        "content": request.content or None,
        "timeout": httpx.Timeout(seconds, connect=min(seconds, MAX_CONNECT_S)),
    }


def describe_failure(error: httpx.RequestError, step: Send, proxy: str) -> ConnectionFailedError:
    """Why there is no reply; ``proxy``: what ``find_proxy`` says."""
    sent = not isinstance(error, NEVER_SENT)
    if isinstance(error, httpx.TimeoutException) and sent:
        return ReplyTimeoutError(f"the server did not reply within {step.silence_s:.3g} s", sent=True)
    said = str(error) or type(error).__name__
    message = (
        "the connection broke off"
        if sent
        else f"no server answers at {error.request.url.copy_with(path='/', query=None)}"
    )
    by = f" (by the proxy of {proxy})" if proxy else ""
    return ConnectionFailedError(f"{message}: {said}{by}", sent=sent)
