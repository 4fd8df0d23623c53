"""What is written on a connection by hand: HTTP that is none, heads that are too large, chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.recorded.request import Request, image, picture

GET = b"GET /livez HTTP/1.1\r\n"
END = b"Host: localhost\r\nConnection: close\r\n\r\n"
POST = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = json.dumps({"layers": ["head"], "inputs": [image(picture(1))]}).encode()
LONG = b"a" * 100_000


def _chunks(data: bytes, size: int) -> bytes:
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


WIRE: dict[str, bytes] = {
    "words": b"hello\r\n\r\n",
    "nuls": b"\0" * 100,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 1.0": b"GET /livez HTTP/1.0\r\n\r\n",
    "line feeds alone": (GET + END).replace(b"\r\n", b"\n"),
    "a nul in a field": GET + b"X: a\0b\r\n" + END,
    "a folded field": GET + b"X: a\r\n b\r\n" + END,
    "a blank before the colon": GET + b"X : a\r\n" + END,
    "bytes in a target": b"GET /\xff\xfe HTTP/1.1\r\n" + END,
    "a url as the target": b"GET http://localhost/livez HTTP/1.1\r\n" + END,
    "connect": b"CONNECT x:80 HTTP/1.1\r\n" + END,
    "no host": GET + b"Connection: close\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length below zero": POST + b"Content-Length: -5\r\n\r\n",
    "a length of words": POST + b"Content-Length: two\r\n\r\n{}",
    "an unknown encoding": POST + b"Transfer-Encoding: bogus\r\n\r\n{}",
    "a chunk of words": CHUNKED + b"two\r\n{}\r\n0\r\n\r\n",
    "a large field": GET + b"X: " + LONG + b"\r\n" + END,
    "a large name": GET + LONG + b": x\r\n" + END,
    "a large target": b"GET /livez?" + LONG + b" HTTP/1.1\r\n" + END,
    "300 fields": GET + b"X: a\r\n" * 300 + END,
    "200 fields": GET + b"X: a\r\n" * 200 + END,
    "chunks": CHUNKED + _chunks(GOOD, 500),
    "one chunk": CHUNKED + _chunks(GOOD, 10**6),
    "expect 100": POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "a body too large": POST + b"Content-Length: 100000000\r\n\r\n",
    "upgrade": GET + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "a body for livez": GET.replace(b"GET", b"POST") + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}",
}


def requests() -> Iterator[Request]:
    """Bytes, each on a connection of its own."""
    for name, data in WIRE.items():
        yield Request(f"connections/{name}", "GET", wire=data)
