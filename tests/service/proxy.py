"""A reverse proxy that has a server beneath a prefix: what people put before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

BETWEEN = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})


@contextmanager
def proxied(upstream: str, prefix: str, *, strip: bool) -> Iterator[str]:
    """The address of a proxy that passes on what is beneath ``prefix``, with or without it; all else is its own 404."""
    target = httpx.URL(upstream)

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith(f"{prefix}/"):
                self.answer(404, [], b"the proxy knows nothing there")
                return
            path = self.path.removeprefix(prefix) if strip else self.path
            with closing(HTTPConnection(target.host, target.port, timeout=60)) as connection:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in BETWEEN}
                connection.request(self.command, path, body or None, headers)
                reply = connection.getresponse()
                self.answer(reply.status, reply.getheaders(), reply.read())

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in BETWEEN:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = pass_on  # noqa: N815  (names that the library calls)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="proxy")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
