"""``application/x-npz``: one array per key, in an uncompressed zip archive as numpy writes it."""

from __future__ import annotations

import zipfile
from typing import IO, cast

import numpy as np

from layertap.service.features import Features
from layertap.service.formats.buffers import BufferFile, Buffers, name_arrays
from layertap.service.formats.npy import write_npy
from layertap.service.formats.reply_format import EncodeOptions

SKIPPED = "skipped"
_ZIP64_FROM = 2**31 - 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The results as a .npz file, scales as ``KEY.scale``; ``options`` change nothing.

    ``skipped`` holds the places of the inputs that were left out, where some were.

    The same features give the same bytes. NotAcceptableError: two arrays of the same name.
    """
    file = BufferFile()
    # No result has that name.
    skipped = {SKIPPED: np.array(features.skipped, np.int64)} if features.skipped else {}
    # Not numpy.savez: it takes the keys as keyword arguments, so that one called "file" breaks it, and it writes the
    # time of day into the archive.
    with zipfile.ZipFile(cast("IO[bytes]", file), "w", zipfile.ZIP_STORED) as archive:
        for name, array in {**name_arrays(features), **skipped}.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)
            with archive.open(entry, "w", force_zip64=array.nbytes > _ZIP64_FROM) as body:
                body.writelines(write_npy(array))
    return file.buffers
