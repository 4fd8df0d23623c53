"""``application/vnd.apache.arrow.stream``: a row for each input, a column for each result; by the extra ``arrow``."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import BufferFile, Buffers, name_arrays, to_little_endian
from layertap.service.formats.plain_data import describe_as_text
from layertap.service.formats.reply_format import EncodeOptions

_HINT = "leave it out, or use application/x-npz (format=npz) or application/x-safetensors"


def check_installed() -> None:
    """NotAcceptableError where there is no pyarrow; it is not imported, which takes long."""
    if find_spec("pyarrow") is None:
        hint = 'use another format; the operator types pip install "layertap[arrow]"'
        raise NotAcceptableError("Arrow replies need pyarrow, which is not installed here", hint=hint)


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The results as an Arrow stream of one record batch; ``options`` change nothing.

    A result of shape (rows, …) is a column of fixed-shape tensors, one of shape (rows,) a column of numbers; scales are
    columns ``KEY.scale``, booleans are uint8. Where rows lie on another axis it comes first here. The schema's metadata
    is that of safetensors.

    NotAcceptableError: a result without a row for each input, or two columns of the same name.
    """
    import pyarrow as pa

    columns = {name: _make_column(by_row) for name, by_row in _arrange_by_rows(features).items()}
    batch = pa.RecordBatch.from_pydict(columns, metadata=describe_as_text(features))
    file = BufferFile()
    with pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    return file.buffers


def _arrange_by_rows(features: Features) -> dict[str, Array]:
    """Results and scales with a row for each input on axis 0."""
    arranged: dict[str, Array] = {}
    for name, array in name_arrays(features).items():
        key = name if name in features.arrays else name.removesuffix(".scale")
        axis = features.receipts[key].row_axis
        if axis is None or key in features.by_input:
            reason = "is one for all inputs" if axis is None else "has another shape for each input"
            raise NotAcceptableError(f"Arrow holds a row for each input; {escape(key)} {reason}", hint=_HINT)
        if axis and key in features.scales:
            detail = f"{escape(key)} as int8 has its rows on axis {axis}, and scales that are not of rows"
            raise NotAcceptableError(detail, hint='leave out "dtype": "int8", or use application/x-npz (format=npz)')
        arranged[name] = _split_rows(np.moveaxis(array, axis, 0), features.rows)
    return arranged


def _split_rows(array: Array, rows: int) -> Array:
    """An array with an axis of its own for what each row has several of: windows that are folded into the batch."""
    count = len(array) // rows
    return to_little_endian(array if count == 1 else array.reshape(rows, count, *array.shape[1:]))


def _make_column(array: Array) -> Any:
    import pyarrow as pa

    # Booleans are bits in Arrow, of which pyarrow and numpy make no tensors.
    numbers = array.view(np.uint8) if array.dtype == np.bool_ else array
    values, shape = pa.array(numbers.reshape(-1)), array.shape[1:]
    if not shape:
        return values
    # Not from_arrays, which can't tell how many lists of nothing there are.
    lists = pa.FixedSizeListArray.from_buffers(
        pa.list_(values.type, prod(shape)), len(array), [None], children=[values]
    )
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(values.type, shape), lists)
