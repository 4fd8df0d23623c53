"""How many pixels a picture has, by the first bytes of its file: for plans, before anything is decoded."""

from __future__ import annotations

from struct import error, unpack_from

MAX_SEGMENTS = 64  # of a JPEG, before its frame
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of a JPEG's frame


def count_pixels(data: bytes) -> int:
    """The pixels that a PNG, JPEG or WebP says it has; 0 for another file, or a damaged one."""
    try:
        if data.startswith(b"\x89PNG"):
            width, height = unpack_from(">II", data, 16)
        elif data.startswith(b"\xff\xd8"):
            width, height = _read_frame(data)
        elif data[8:16] == b"WEBPVP8X":
            low, high, below, above = unpack_from("<HBHB", data, 24)
            width, height = 1 + low + (high << 16), 1 + below + (above << 16)
        elif data[8:16] == b"WEBPVP8 ":
            width, height = (side & 0x3FFF for side in unpack_from("<HH", data, 26))
        elif data[8:16] == b"WEBPVP8L":
            (sides,) = unpack_from("<I", data, 21)
            width, height = 1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF)
        else:
            return 0
    except error:
        return 0
    return int(width * height)


def _read_frame(data: bytes) -> tuple[int, int]:
    """The width and height of a JPEG's frame; (0, 0) if none is found."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        lead, marker, size = unpack_from(">BBH", data, at)
        if lead != 0xFF:
            break
        if marker in FRAMES:
            height, width = unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + size
    return 0, 0
