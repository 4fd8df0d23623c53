"""Hostile pictures, made by hand: each claims more than it holds, or has so many pieces that these alone are work."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

from PIL import Image

MIB = 1 << 20
SIDE = 7000  # its square is within the limit of pixels
BEYOND = 30_000
TRICK = "\U0001f984"
Tag = tuple[int, int, int, int]  # of a TIFF: its number, the kind and count of its values, the value or its place
PNG_START = b"\x89PNG\r\n\x1a\n"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as a file."""
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def zeros(count: int) -> bytes:
    """So many zeros, deflated, without ever holding them."""
    deflate, block = zlib.compressobj(9), bytes(MIB)
    parts = [deflate.compress(block[: min(MIB, count - at)]) for at in range(0, count, MIB)]
    return b"".join([*parts, deflate.flush()])


def chunk(name: bytes, content: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, body: bytes | None = None, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """A gray PNG of zeros: its pixels are all there, or ``body`` stands for them."""
    packed = zeros(height * (width + 1)) if body is None else body
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return PNG_START + chunk(b"IHDR", head) + before + chunk(b"IDAT", packed) + after + chunk(b"IEND")


def segment(mark: int, body: bytes = b"") -> bytes:
    """A segment of a JPEG."""
    return bytes([0xFF, mark]) + struct.pack(">H", len(body) + 2) + body


def jpeg(width: int, height: int, scans: int, *, before: bytes = b"", between: bytes = b"", dc: bool = True) -> bytes:
    """A gray progressive JPEG: a scan of DC values, then scans that say in a few bytes that no block has any others.

    Without ``dc`` the first scan is empty.
    """
    blocks = -(-width // 8) * -(-height // 8)
    frame = segment(0xC2, struct.pack(">BHH", 8, height, width) + bytes([1, 1, 0x11, 0]))
    tables = segment(0xDB, bytes([0] + [1] * 64))
    # One code of one bit each: for a DC value of zero, and for the end of a band of 16,384 blocks and up.
    tables += segment(0xC4, bytes([0x00, 1, *[0] * 15, 0])) + segment(0xC4, bytes([0x10, 1, *[0] * 15, 0xE0]))
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 1])) + (bytes(-(-blocks // 8)) if dc else b"")
    bits = ("0" + "1" * 14) * -(-blocks // 32767)
    length = -(-len(bits) // 8)
    band = int(bits.ljust(8 * length, "1"), 2).to_bytes(length, "big").replace(b"\xff", b"\xff\0")
    other = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + band
    return b"\xff\xd8" + before + tables + frame + between.join([first] + [other] * (scans - 1)) + b"\xff\xd9"


def gif(screen: tuple[int, int], frame: tuple[int, int], *, before: bytes = b"") -> bytes:
    """A GIF of two colours whose screen and frame claim sizes of their own, with the pixel of a frame of one."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + before + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\0;"


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP of chunks."""
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(each)) + each + bytes(len(each) & 1) for name, each in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int) -> bytes:
    """A WebP whose canvas claims that size, around a picture of one pixel."""
    canvas = bytes(4) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return riff((b"VP8X", canvas), (b"VP8L", saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[20:]))


def webp_lossless(width: int, height: int) -> bytes:
    """A lossless WebP that claims that size, with next to nothing behind it."""
    return riff((b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(20)))


def webp_lossy(width: int, height: int) -> bytes:
    """A WebP of 8 by 8 pixels that claims another size."""
    data = bytearray(saved(Image.new("RGB", (8, 8)), "WEBP"))
    struct.pack_into("<HH", data, data.index(b"\x9d\x01\x2a") + 3, width, height)
    return bytes(data)


def bmp(width: int, height: int, body: bytes = bytes(64), *, packed: int = 0, bits: int = 24) -> bytes:
    """A BMP that claims that size: plain, or as run lengths of 8 (1) or 4 bits (2)."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, packed, 0, 0, 0, 0, 0)
    palette = bytes(range(256)) * (1 << bits >> 6) if bits <= 8 else b""
    offset = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset) + head + palette + body


def tiff(tags: Iterable[Tag], body: bytes = b"", *, big: bool = False, following: int = 0) -> bytes:
    """A little-endian TIFF: ``body`` from byte 8 (16 of a BigTIFF) on, then a directory, and where the next one is."""
    rows = sorted(tags)
    if big:
        entries = b"".join(struct.pack("<HHQQ", *row) for row in rows)
        head = b"II+\0\x08\0\0\0" + struct.pack("<Q", 16 + len(body))
        return head + body + struct.pack("<Q", len(rows)) + entries + struct.pack("<Q", following)
    entries = b"".join(struct.pack("<HHII", *row) for row in rows)
    head = b"II*\0" + struct.pack("<I", 8 + len(body))
    return head + body + struct.pack("<H", len(rows)) + entries + struct.pack("<I", following)


def gray(width: int, height: int, packed: int = 1, length: int = 64, **changes: Tag | None) -> list[Tag]:
    """The tags of a gray picture in one strip; ``t273=None`` leaves one out, ``t273=(273, …)`` changes it."""
    size: list[Tag] = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, packed), (262, 3, 1, 1)]
    strips: list[Tag] = [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, length)]
    kept = [tag for tag in size + strips if f"t{tag[0]}" not in changes]
    return kept + [tag for tag in changes.values() if tag is not None]


def tiled(width: int, height: int, *, big: bool = False, kind: int = 4) -> bytes:
    """A TIFF of one pixel in one deflated tile that claims that size."""
    size: dict[str, Tag] = {"t322": (322, kind, 1, width), "t323": (323, kind, 1, height)}
    place: dict[str, Tag] = {"t324": (324, 4, 1, 16 if big else 8), "t325": (325, 4, 1, 64)}
    tags = gray(1, 1, 8, t273=None, t278=None, t279=None, **size, **place)
    return tiff(tags, zlib.compress(bytes(64)).ljust(64, b"\0"), big=big)


def packed(kind: int, body: bytes, side: int = SIDE, bits: int = 8) -> bytes:
    """A gray TIFF that claims so many pixels in a strip packed in some way."""
    return tiff(gray(side, side, kind, len(body), t258=(258, 3, 1, bits)), body)


def exif(count: int, size: int) -> bytes:
    """An EXIF block of which each entry points to the same bytes."""
    entries = b"".join(struct.pack("<HHII", 0x9000 + number, 7, size, 8) for number in range(count))
    return b"II*\0" + struct.pack("<I", 8 + size) + bytes(size) + struct.pack("<H", count) + entries + bytes(4)


@dataclass(frozen=True)
class Hostile:
    """A picture: what makes it, the status it gets, and a word that the answer says."""

    make: Callable[[], bytes]
    status: int
    says: str = ""


def lie(make: Callable[..., bytes], *arguments: Any, **options: Any) -> Hostile:
    """Claims that many pixels: too few bytes for them."""
    return Hostile(partial(make, *arguments, **options), 422, "cut short")


def beyond(make: Callable[..., bytes], *arguments: Any, says: str = "pixels", **options: Any) -> Hostile:
    """Something of it is over a limit."""
    return Hostile(partial(make, *arguments, **options), 413, says)


def good(make: Callable[..., bytes], *arguments: Any, **options: Any) -> Hostile:
    """Looks worse than it is."""
    return Hostile(partial(make, *arguments, **options), 200)


# Small files, refused before a pixel is decoded.
SMALL: dict[str, Hostile] = {
    "png of 900 megapixels": beyond(png, BEYOND, BEYOND, zeros(3_000_000), says="900000000"),
    "png that claims 49 megapixels": lie(png, SIDE, SIDE, zeros(100)),
    "png of 1 by 20000": beyond(png, 1, 20_000, says="resized"),
    "png of 20000 by 1": beyond(png, 20_000, 1, says="resized"),
    "png of 1 by 49 million": beyond(png, 1, 49_000_000, zeros(98_000_000), says="49000000"),
    "png with a profile of 20 MB": Hostile(
        lambda: png(8, 8, before=chunk(b"iCCP", b"k\0\0" + zeros(20 * MIB))), 422, "damaged"
    ),
    "png with a text of 20 MB": Hostile(
        lambda: png(8, 8, before=chunk(b"zTXt", b"k\0\0" + zeros(20 * MIB))), 422, "damaged"
    ),
    "png with 50,000 chunks": Hostile(lambda: png(8, 8, before=chunk(b"aaAa") * 50_000), 413, "pieces"),
    "png with 50,000 chunks after": Hostile(lambda: png(8, 8, after=chunk(b"aaAa") * 50_000), 413, "pieces"),
    "jpeg of 1,500 scans": beyond(jpeg, 1000, 1000, 1500, says="100 scans"),
    "jpeg of 1,500 scans and 49 megapixels": beyond(jpeg, SIDE, SIDE, 1500, says="100 scans"),
    "jpeg of scans behind a false end": beyond(
        jpeg, 1000, 1000, 1500, between=segment(0xFE, b"\xff\xd9"), says="100 scans"
    ),
    "jpeg of scans and comments": beyond(jpeg, 1000, 1000, 150, between=segment(0xFE) * 20, says="100 scans"),
    "jpeg of 65,500 by 65,500": beyond(jpeg, 65_500, 65_500, 2, dc=False),
    "jpeg that claims 49 megapixels": lie(jpeg, SIDE, SIDE, 2, dc=False),
    "jpeg with 50,000 comments": Hostile(lambda: jpeg(8, 8, 2, before=segment(0xFE) * 50_000), 413, "pieces"),
    "jpeg with 50,000 EXIF blocks": Hostile(
        lambda: jpeg(8, 8, 2, before=segment(0xE1, b"Exif\0\0a") * 50_000), 413, "pieces"
    ),
    "jpeg with 50,000 fill bytes": Hostile(lambda: jpeg(8, 8, 2, before=b"\xff" * 50_000), 413, "pieces"),
    "gif with a screen of 65,535": beyond(gif, (65_535, 65_535), (1, 1)),
    "gif with a frame of 65,535": beyond(gif, (1, 1), (65_535, 65_535)),
    "gif that claims 49 megapixels": lie(gif, (SIDE, SIDE), (SIDE, SIDE)),
    "gif with 50,000 comments": Hostile(lambda: gif((1, 1), (1, 1), before=b"!\xfe\x01a\0" * 50_000), 413, "pieces"),
    "webp with a canvas of 16,000": beyond(webp_canvas, 16_000, 16_000),
    "webp with a canvas of 2^24 by 128": beyond(webp_canvas, 1 << 24, 128),
    "webp with a canvas of 49 megapixels": lie(webp_canvas, SIDE, SIDE),
    "webp, lossless, of 16,383": beyond(webp_lossless, 16_383, 16_383),
    "webp, lossy, of 16,383": beyond(webp_lossy, 16_383, 16_383),
    "webp, lossy, that claims 49 megapixels": lie(webp_lossy, SIDE, SIDE),
    "bmp of 65,535": beyond(bmp, 65_535, 65_535),
    "bmp of a negative width": beyond(bmp, -SIDE, SIDE),
    "bmp of the lowest height": beyond(bmp, SIDE, -(2**31)),
    "bmp that claims 49 megapixels": lie(bmp, SIDE, SIDE),
    "bmp that claims them upside down": lie(bmp, SIDE, -SIDE),
    "bmp of run lengths, a row each": lie(bmp, SIDE, SIDE, b"\1\0\0\0" * SIDE, packed=1, bits=8),
    "bmp of run lengths of 4 bits": lie(bmp, SIDE, SIDE, b"\xff\0" * 192_200, packed=2, bits=4),
}

# As large as a body may be: refused or answered, but soon.
LARGE: dict[str, Hostile] = {
    "png of 2.5 million chunks": Hostile(lambda: png(8, 8, before=chunk(b"aaAa") * 2_500_000), 413, "pieces"),
    "png of 2.5 million empty rows": Hostile(lambda: png(8, 8, before=chunk(b"IDAT") * 2_500_000), 413, "pieces"),
    "png of 2.5 million chunks after": Hostile(lambda: png(8, 8, after=chunk(b"aaAa") * 2_500_000), 413, "pieces"),
    "png of 60 texts of 1 MB": good(lambda: png(8, 8, before=chunk(b"zTXt", b"k\0\0" + zeros(MIB - 10)) * 60)),
    "png of 60 wide texts of 1 MB": good(
        lambda: png(
            8, 8, before=chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(TRICK.encode() + b"a" * (MIB - 40))) * 60
        )
    ),
    "png with an EXIF block of many to one": good(lambda: png(8, 8, before=chunk(b"eXIf", exif(1000, 10 * MIB)))),
    "jpeg of 7.5 million comments": Hostile(lambda: jpeg(8, 8, 2, before=segment(0xFE) * 7_500_000), 413, "pieces"),
    "jpeg of 7.5 million unknown segments": Hostile(
        lambda: jpeg(8, 8, 2, before=segment(0xE5) * 7_500_000), 413, "pieces"
    ),
    "jpeg of 2.5 million EXIF blocks": Hostile(
        lambda: jpeg(8, 8, 2, before=segment(0xE1, b"Exif\0\0a") * 2_500_000), 413, "pieces"
    ),
    "jpeg of 30 MB of fill bytes": Hostile(lambda: jpeg(8, 8, 2, before=b"\xff" * 30_000_000), 413, "pieces"),
    "jpeg of 480 EXIF blocks": good(lambda: jpeg(8, 8, 2, before=segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 480)),
    "jpeg of comments between scans": good(lambda: jpeg(8, 8, 3, between=segment(0xFE) * 3_500_000)),
    "jpeg of 480 segments of tables": good(
        lambda: jpeg(8, 8, 2, before=segment(0xDB, bytes([0] + [1] * 64) * 1008) * 480)
    ),
    "gif of 6 million comments": Hostile(
        lambda: gif((1, 1), (1, 1), before=b"!\xfe\x01a\0" * 6_000_000), 413, "pieces"
    ),
    "gif of a comment of 30 MB": Hostile(
        lambda: gif((1, 1), (1, 1), before=b"!\xfe" + (b"\xff" * 256) * 120_000 + b"\0"), 413, "pieces"
    ),
    "webp of 3.5 million chunks": good(
        lambda: riff(
            (b"VP8L", saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[20:]), *[(b"abcd", b"")] * 3_500_000
        )
    ),
    "bmp of 15 million runs": lie(bmp, 1400, 1400, b"\1\0" * 15_000_000, packed=1, bits=8),
}

PLAIN = Image.linear_gradient("L").resize((24, 16)).convert("RGB")

# Of any size, for a server with workers: no other decodes a TIFF.
TIFFS: dict[str, Hostile] = {
    "tiff of 65,535": beyond(tiff, gray(65_535, 65_535)),
    "tiff that claims 49 megapixels": lie(tiff, gray(SIDE, SIDE), bytes(64)),
    "tiff, deflated, that claims them": lie(packed, 8, zlib.compress(bytes(64))),
    "tiff, LZW, that claims them": lie(packed, 5, bytes(64)),
    "tiff, PackBits, that claims them": lie(packed, 32773, b"\x81\0" * 32),
    "tiff, a fax, that claims them": lie(packed, 4, bytes(64), bits=1),
    "tiff, LZMA, that claims them": lie(packed, 34925, bytes(64)),
    "tiff of 49 megapixels in 48 KB": good(lambda: packed(8, zeros(SIDE * SIDE))),
    "tiff of a tile of 49 megapixels": lie(tiled, SIDE, SIDE),
    "tiff of a tile of 1.8 gigapixels": lie(tiled, 60_000, 30_000),
    "tiff of a tile with signs": lie(tiled, 60_000, 30_000, big=True, kind=17),
    "tiff of 1,500 scans": lie(lambda: packed(7, jpeg(1000, 1000, 1500), 1000)),
    "tiff of 65,000 entries": Hostile(
        lambda: tiff([*gray(1, 1), *((500 + n, 7, 1000, 8) for n in range(65_000))], bytes(1000)), 413, "pieces"
    ),
    "tiff of entries over each other": Hostile(
        lambda: tiff([*gray(1, 1), *((500 + n, 7, MIB, 8) for n in range(6000))], bytes(MIB)), 413, "pieces"
    ),
    "tiff of a directory beyond 64 bits": lie(lambda: b"II+\0\x08\0\0\0" + b"\xff" * 8 + bytes(64)),
    "tiff of entries beyond 64 bits": lie(lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**64 - 1) + bytes(64)),
    "tiff of a strip beyond its end": lie(tiff, gray(8, 8, t273=(273, 4, 1, 2**31)), bytes(64)),
    "tiff of a page that comes after itself": good(tiff, gray(8, 8), bytes(64), following=72),
    "tiff of a next page beyond its end": good(tiff, gray(8, 8), bytes(64), following=2**32 - 1),
    "tiff of a million strips": good(tiff, gray(1, 1, t273=(273, 3, MIB, 8)), bytes(2 * MIB)),
    "tiff of strips over each other": Hostile(
        lambda: tiff(gray(2000, 40_001, t273=(273, 4, 60_000, 8), t278=(278, 4, 1, 1)), bytes(240_000)), 413, ""
    ),
    "tiff of no size": lie(tiff, [(258, 3, 1, 8)]),
    "tiff of no pixels": lie(tiff, gray(0, 0)),
    "tiff of a width in floats": lie(tiff, gray(8, 8, t256=(256, 11, 1, 0x41000000)), bytes(64)),
    "tiff of bits in text": Hostile(partial(tiff, gray(8, 8, t258=(258, 2, 4, 0x41414141)), bytes(64)), 415),
    "tiff of samples beyond number": Hostile(partial(tiff, gray(8, 8, t277=(277, 4, 1, 2**32 - 1)), bytes(64)), 415),
    "start of a tiff": lie(lambda: b"II*\0"),
}

# What is none of the formats; some look like one of them at the start.
FOREIGN: dict[str, bytes] = {
    "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hosts"/></svg>',
    "svg of entities": b'<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/hosts">]><svg>&x;</svg>',
    "eps": saved(PLAIN, "EPS"),
    "eps with a preview": b"\xc5\xd0\xd3\xc6" + struct.pack("<6I", 30, 100, 0, 0, 0, 0) + bytes(100),
    "pdf": saved(PLAIN, "PDF"),
    "psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3) + bytes(200),
    "ico": saved(PLAIN, "ICO"),
    "icns": saved(PLAIN, "ICNS"),
    "tga": saved(PLAIN, "TGA"),
    "ppm": saved(PLAIN, "PPM"),
    "pcx": saved(PLAIN, "PCX"),
    "sgi": saved(PLAIN, "SGI"),
    "dds": saved(PLAIN, "DDS"),
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 " + bytes(40),
    "avif": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(40),
    "dib": saved(PLAIN, "DIB"),
    "pickle": pickle.dumps({"image": 1}),
    "pickle in ASCII": pickle.dumps({"image": 1}, 0),
    "zip": b"PK\3\4" + bytes(26),
    "html": b"<html><img src=x></html>",
    "wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(20),
    "mng": b"\x8aMNG\r\n\x1a\n" + bytes(40),
    "wmf": b"\xd7\xcd\xc6\x9a" + bytes(40),
    "fits": b"SIMPLE  =                    T".ljust(2880),
}
LABELS = {
    "application/pdf": "pdf",
    "application/postscript": "eps",
    "application/octet-stream": "png",
    "application/x-pickle": "pickle",
    "application/python-pickle": "pickle",
    "application/zip": "zip",
    "text/html": "html",
}
