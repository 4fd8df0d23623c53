"""The layouts of a job's files: results as columns, or arrays in files of their own beside a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layertap.models.errors import LayertapError
from layertap.service.bulk.job import Outline, Rows
from layertap.service.bulk.manifest import replace_file
from layertap.service.features import Array

RESERVED = frozenset({"key", "digest", "fingerprint", "error", "shard", "row"})
WriteShard = Callable[[Path, str, Mapping[str, Array]], str]  # folder, part's name, arrays; the shard's name


@dataclass(frozen=True)
class Layout:
    """A way to write a part: ``write_shard`` None where results are columns of its table."""

    name: str
    write_shard: WriteShard | None = None

    def check(self, outline: Outline) -> None:
        """LayertapError where results don't fit."""
        for name, column in outline.columns.items():
            if name in RESERVED:
                raise LayertapError(f"no result may be called {name}", hint="name the layer's call: LAYER#-1")
            if self.write_shard is None and len(column.shape) != 1:
                raise LayertapError(
                    f"{name} is {list(column.shape)} for each input, and no vector",
                    hint="add --pool mean, or --out a folder and --format safetensors or npy",
                )

    def make_table(self, folder: Path, name: str, parts: Sequence[Rows], outline: Outline) -> Any:
        """A part's table; its arrays are written first where they have a file of their own."""
        import pyarrow as pa

        errors = [error for rows in parts for error in rows.errors]
        good = np.array([error is None for error in errors], bool)
        arrays = {key: np.concatenate([rows.arrays[key] for rows in parts]) for key in outline.columns}
        fingerprints = [rows.fingerprint if error is None else None for rows in parts for error in rows.errors]
        columns: dict[str, Any] = {
            "key": pa.array([key for rows in parts for key in rows.keys], pa.string()),
            "digest": pa.array([digest for rows in parts for digest in rows.digests], pa.string()),
        }
        if self.write_shard is None:
            columns |= {key: _make_vectors(array, good) for key, array in arrays.items()}
        else:
            shard = self.write_shard(folder, name, arrays) if good.any() else None
            numbers = np.cumsum(good) - 1
            columns["shard"] = pa.array([shard if each else None for each in good], pa.string())
            columns["row"] = pa.array(numbers, pa.int64(), mask=~good)
        columns["fingerprint"] = pa.array(fingerprints, pa.string())
        columns["error"] = pa.array(errors, pa.string())
        return pa.table(columns, metadata={})


def _make_vectors(array: Array, good: Any) -> Any:
    """Fixed-size lists, null where there is no row."""
    import pyarrow as pa

    width = array.shape[1]
    values = np.zeros((len(good), width), array.dtype)
    values[good] = array
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width, mask=pa.array(~good))


def _write_safetensors(folder: Path, name: str, arrays: Mapping[str, Array]) -> str:
    from safetensors.numpy import save

    shard = f"{name}.safetensors"
    data = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    with replace_file(folder / shard) as temporary:
        temporary.write_bytes(data)
    return shard


def _write_npy(folder: Path, name: str, arrays: Mapping[str, Array]) -> str:
    """A file for each result, by its place in the question: layers may have names that no file has."""
    for number, array in enumerate(arrays.values()):
        with replace_file(folder / f"{name}.{number}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    return name


LAYOUTS = {
    "parquet": Layout("parquet"),
    "safetensors": Layout("safetensors", _write_safetensors),
    "npy": Layout("npy", _write_npy),
}
