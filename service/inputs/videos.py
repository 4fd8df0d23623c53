"""Decodes videos by PyAV, frame by frame, and keeps what is made of some of the frames.

The first bytes decide which of a few demuxers reads a file. Few decoders are used, and no other file or address is
opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.service.settings import Settings

STARTS = {  # what a file begins with, by FFmpeg's name of its demuxer
    "mov": re.compile(rb"....ftyp", re.DOTALL),
    "matroska": re.compile(rb"\x1a\x45\xdf\xa3"),
    "gif": re.compile(rb"GIF8[79]a"),
}
DECODERS = ("h264", "hevc", "mpeg4", "vp8", "vp9", "libdav1d", "av1", "gif")
SAFE = {"codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none"}
SEGMENT, HEAD = re.compile(rb"\x18\x53\x80\x67\x01(.{7})", re.DOTALL), 4096  # of a WebM: its size, near the start
GIF_BLOCK, MAX_GIF_BLOCKS = re.compile(rb"[,!;]"), 2**19  # a frame, an extension, the end; of up to 255 bytes each
UNKNOWN = 2**56 - 1  # the size of a WebM that was written to a pipe
BORDERS = 2**16  # pixels around a small frame, at most
FORMATS_HINT = "send a complete MP4, WebM or GIF file: H.264, HEVC, MPEG-4, VP8, VP9 or AV1"
INSTALL_HINT = 'send its frames as an array; the operator types pip install "layertap[video]"'
SMALLER_HINT = "send a part of it, or a smaller one"
Choose = Callable[[int], Sequence[int]]
T = TypeVar("T")


def decode_video(
    data: bytes, choose: Choose, make: Callable[[Image.Image], T], settings: Settings
) -> tuple[list[T], Sequence[int], list[float]]:
    """What is made of the chosen frames of a file, which are upright and RGB; their numbers; their seconds, if known.

    ``choose`` returns the numbers for how many frames there are, in order. InputError: an unknown format, damaged, cut
    short, without a video, or PyAV is not installed. TooLargeError: beyond the settings' limits. Raises what ``choose``
    and ``make`` raise.
    """
    name = next((name for name, start in STARTS.items() if start.match(data)), None)
    if name is None:
        raise InputError("the bytes are not a video of a known format", hint=FORMATS_HINT)
    if _is_cut(name, data):
        raise InputError("the video is cut short", hint=FORMATS_HINT)
    with _open(name, data, settings) as (container, stream):
        length = _count_packets(container, stream, settings)
    while True:
        numbers, made, seconds, count = choose(length), list[T](), list[float](), 0
        with _open(name, data, settings) as (container, stream):
            for count, frame in enumerate(container.decode(stream), 1):
                check_frames(count, settings)
                _check(frame.width * frame.height, settings.max_pixels, "pixels a frame")
                if len(made) < len(numbers) and count - 1 == numbers[len(made)]:
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                    made.append(make(Image.fromarray(np.ascontiguousarray(pixels))))
                    seconds += [] if frame.time is None else [float(frame.time)]
        if count == length:
            return made, numbers, seconds if len(seconds) == len(made) else []
        length = count  # some packets hold no frame, or several


@contextmanager
def _open(name: str, data: bytes, settings: Settings) -> Iterator[tuple[Any, Any]]:
    """The container and its video; errors as above."""
    try:
        av = import_module("av")
    except (ImportError, OSError):  # OSError: without its library
        raise InputError("videos need av, which is not installed here", hint=INSTALL_HINT) from None
    bounds = {"max_pixels": str(2 * settings.max_pixels + BORDERS)}  # of a buffer: decoders ask for no larger one
    try:
        options = {"options": bounds, "container_options": SAFE, "metadata_errors": "replace"}
        with av.open(BytesIO(data), format=name, **options) as container:
            stream = container.streams.best("video")
            if stream is None or stream.codec_context is None or stream.codec_context.name not in DECODERS:
                raise InputError("the file holds no video of a known kind", hint=FORMATS_HINT)
            context = stream.codec_context
            _check(context.width * context.height, settings.max_pixels, "pixels a frame")
            context.options, context.thread_count = bounds, 1
            yield container, stream
    except (LayertapError, MemoryError):
        raise
    except Exception as error:  # a third party's code raises anything
        detail = f"the video can't be decoded: damaged, cut short, or of an unsupported kind ({type(error).__name__})"
        raise InputError(detail, hint=FORMATS_HINT) from error


def _count_packets(container: Any, stream: Any, settings: Settings) -> int:
    """How many packets a video has, in most files as many as frames; nothing is decoded. Errors as above."""
    _check((container.duration or 0) / 1e6, settings.max_video_s, "s")
    count, times = 0, [0.0]
    for packet in container.demux(stream):
        count += packet.size > 0
        check_frames(count, settings)
        times += [] if packet.pts is None else [float((packet.pts - (stream.start_time or 0)) * packet.time_base)]
        if packet.is_corrupt:
            raise InputError("the video is cut short, or damaged", hint=FORMATS_HINT)
    _check(max(times), settings.max_video_s, "s")
    return count


def _is_cut(name: str, data: bytes) -> bool:
    """Whether a file ends before the end that it names, where FFmpeg would decode what is there."""
    if name == "gif":
        return not _has_trailer(data)
    segment = SEGMENT.search(data, 0, HEAD) if name == "matroska" else None
    size = int.from_bytes(segment[1], "big") if segment is not None else UNKNOWN
    return segment is not None and size != UNKNOWN and segment.end() + size > len(data)


def _has_trailer(data: bytes) -> bool:
    """Whether the blocks of a GIF lead to the one that ends it; what follows is ignored, as by every reader."""
    place, left = 13 + _measure_colors(data[10:11]), MAX_GIF_BLOCKS
    while (found := GIF_BLOCK.search(data, place)) is not None and (kind := found[0]) != b";" and left:
        place = found.start()
        if kind == b",":  # a frame: its head, its colours and the size of its codes
            place += 11 + _measure_colors(data[place + 9 : place + 10])
        else:
            place += 2
        while left and (size := data[place : place + 1]):
            place, left = place + 1 + size[0], left - 1
            if size == b"\0":
                break
    return found is not None and found[0] == b";"


def _measure_colors(flags: bytes) -> int:
    """The bytes of the table of colours behind a head with these flags."""
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def check_frames(count: int, settings: Settings) -> None:
    """TooLargeError if a video, in whatever form, has more frames than the limit."""
    _check(count, settings.max_video_frames, "frames")


def _check(value: float, limit: float, unit: str) -> None:
    if value > limit:
        raise TooLargeError(f"the video has {value:.10g} {unit}, the limit is {limit:.10g}", hint=SMALLER_HINT)
