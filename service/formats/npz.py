"""``application/x-npz``: one array per key, in an uncompressed zip archive as numpy writes it."""

from __future__ import annotations

import zipfile
from io import BytesIO

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats import npy
from layertap.service.formats.negotiation import Encoding

SKIPPED, FILES, FINGERPRINT = "skipped", "files", "fingerprint"
_ZIP64_FROM = 2**31 - 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def encode(features: Features, encoding: Encoding) -> bytes:
    """The results as a .npz file, scales as ``KEY.scale``; ``encoding`` has no bearing on it.

    ``skipped`` holds the places of the inputs that were left out, where some were; ``files`` and ``fingerprint`` are
    there where the rows are of files.

    The same features give the same bytes. NotAcceptableError: two arrays of the same name.
    """
    stream = BytesIO()
    # Not numpy.savez: it takes the keys as keyword arguments, so that one called "file" breaks it, and it writes the
    # time of day into the archive.
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {**named_arrays(features), **_beside(features)}.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)
            with archive.open(entry, "w", force_zip64=array.nbytes > _ZIP64_FROM) as body:
                npy.write(body, array)
    return stream.getvalue()


def _beside(features: Features) -> dict[str, Array]:
    """What else is in the file: no result has any of these names."""
    places = {SKIPPED: np.array(features.skipped, np.int64)} if features.skipped else {}
    files = {FILES: np.array(features.files), FINGERPRINT: np.array(features.fingerprint)} if features.files else {}
    return {**places, **files}


def named_arrays(features: Features) -> dict[str, Array]:
    """Results and scales under one roof: ``KEY`` and ``KEY.scale``; NotAcceptableError where two names meet."""
    scales = {f"{key}.scale": scale for key, scale in features.scales.items()}
    for name in scales.keys() & features.arrays.keys():
        hint = "give one of them another name with `as`, or use application/json"
        raise NotAcceptableError(f"{escape(name)} is a result's name and also that of another's scale", hint=hint)
    return {**features.arrays, **scales}
