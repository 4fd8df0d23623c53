"""``application/x-npy``: a single array; ``application/x-npz``: one array per key in a zip archive."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import IO, cast

from numpy.lib import format as npy_format

from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import SMALL, Buffer, Buffers, EncodeOptions, name_arrays, view_bytes

_HINT = "use application/x-npz (format=npz), which holds any number of arrays"
_ZIP64_FROM = 2**31 - 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def encode_npy(features: Features, options: EncodeOptions) -> Buffers:
    """The only result as a .npy file; NotAcceptableError: none or several results, or one with a scale."""
    if len(features.arrays) != 1:
        detail = f"application/x-npy holds exactly one result; this request has {len(features.arrays)}"
        raise NotAcceptableError(detail, hint=_HINT)
    if options.encoding == "sparse":
        raise NotAcceptableError("application/x-npy has no place for the parts of a sparse result", hint=_HINT)
    if features.scales:
        raise NotAcceptableError("application/x-npy has no place for the scale of an int8 result", hint=_HINT)
    (array,) = features.arrays.values()
    return _write_npy(array)


def encode_npz(features: Features, options: EncodeOptions) -> Buffers:
    """The results as a .npz file, scales as ``KEY.scale``; NotAcceptableError: two arrays of the same name."""
    return encode_arrays(name_arrays(features, options.encoding))


def encode_arrays(arrays: Mapping[str, Array]) -> Buffers:
    """Arrays as a .npz file; the same arrays give the same bytes."""
    file = _BufferFile()
    # numpy.savez fails for the key "file", and writes the current time into the archive.
    with zipfile.ZipFile(cast("IO[bytes]", file), "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)
            with archive.open(entry, "w", force_zip64=array.nbytes > _ZIP64_FROM) as body:
                body.writelines(_write_npy(array))
    return file.buffers


def _write_npy(array: Array) -> Buffers:
    """An array as a .npy file, format version 1.0: its header, which names the byte order, and its data."""
    data = array.tobytes() if array.nbytes <= SMALL else view_bytes(array)
    return [_make_header(array.shape, array.dtype.str), data]


@lru_cache(maxsize=256)
def _make_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The header of an array in C order; cached, because building it takes longer than writing an embedding."""
    stream = BytesIO()
    npy_format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


class _BufferFile:
    """A writable file that keeps the buffers written to it, without copying them.

    zipfile rewrites a member's header, with the same length, once it knows the checksum. A file without ``seek`` would
    get the checksum after the member, where many readers of uncompressed members don't look.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}  # by offset
        self._offset = 0

    @property
    def buffers(self) -> Buffers:
        """The written buffers, in the order of their offsets."""
        return list(self._buffers.values())

    def write(self, data: Buffer) -> int:
        """Keep the bytes of a buffer, which must not change afterwards."""
        data = data if isinstance(data, bytes) else memoryview(data)
        if size := len(data):
            self._buffers[self._offset] = data
            self._offset += size
        return size

    def tell(self) -> int:
        """The offset of the next buffer."""
        return self._offset

    def seek(self, offset: int) -> int:
        """Set the offset of the next buffer."""
        self._offset = offset
        return offset

    def flush(self) -> None:
        """Nothing to flush."""
