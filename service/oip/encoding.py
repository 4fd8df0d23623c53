"""Encodes features as JSON, followed by the bytes of the outputs requested as binary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from fastapi import Response

from layertap.models.errors import Fault
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, Coding, Encoding, name_arrays, to_little_endian, view_bytes
from layertap.service.formats.json import write_json
from layertap.service.formats.table import FORMATS as OF_ROUTES
from layertap.service.formats.table import ReplyFormat
from layertap.service.http.problems import MAX_DETAIL, Problem
from layertap.service.oip.tensors import DATATYPES

HEADER = "Inference-Header-Content-Length"
VERSION = "1"  # the only version of each model


def encode_reply(
    features: Features, request_id: str, binary: Mapping[str, bool], binary_default: bool
) -> tuple[Buffers, Buffers]:
    """The JSON of a reply, and a buffer for each binary output after it: little-endian, in C order.

    ``binary``: by the requested name of an output, which may match several, whether it is binary. In JSON, numbers are
    in one flat list, NaN and infinity are null. Scales of INT8 are outputs ``NAME.scale``. NotAcceptableError if two
    outputs have one name.
    """
    arrays = {name: to_little_endian(array) for name, array in name_arrays(features).items()}
    behind = _find_behind(arrays, binary, binary_default)
    warnings = {"warnings": "; ".join(features.warnings)} if features.warnings else {}
    space = {"space": features.space} if features.space else {}
    head = {
        "model_name": features.model,
        "model_version": VERSION,
        **({"id": request_id} if request_id else {}),
        "parameters": {"fingerprint": features.fingerprint} | space | warnings,
        "outputs": [_describe_output(name, array, features, name in behind) for name, array in arrays.items()],
    }
    return write_json(head), [view_bytes(array) for name, array in arrays.items() if name in behind]


def make_format(binary: Mapping[str, bool], binary_default: bool) -> ReplyFormat:
    """The format of a reply with these outputs as binary."""

    def list_codings(encoding: Encoding, keys: Sequence[str]) -> Sequence[Coding]:
        behind = _find_behind(keys, binary, binary_default)
        return ["bytes" if key in behind else "list" for key in keys]

    return replace(JSON, list_codings=list_codings)


def _find_behind(names: Collection[str], binary: Mapping[str, bool], binary_default: bool) -> set[str]:
    """The names of the outputs that are sent after the JSON; names not requested literally are from globs or tuples."""
    others = [wanted for name, wanted in binary.items() if name not in names]
    default = any(others) if others else binary_default
    return {name for name in names if binary.get(name, default)}


def _describe_output(name: str, array: Array, features: Features, is_behind: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {"binary_data_size": array.nbytes} if is_behind else {}
    if receipt := features.receipts.get(name):
        parameters |= {"fingerprint": receipt.fingerprint, "space": receipt.space}
    described: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": array.shape}
    described |= {"parameters": parameters} if parameters else {}
    return described if is_behind else described | {"data": array.reshape(-1)}


JSON = replace(OF_ROUTES["json"], instead='ask for it as binary: "binary_data": true')
BINARY = replace(OF_ROUTES["npy"], name="binary", media_type="application/octet-stream")  # about the size of its arrays
FORMATS = {each.name: each for each in (JSON, BINARY)}
STATUS = {406: 400, 415: 400, 422: 400}  # all others stay the same


def encode_error(problem: Problem) -> Response:
    """A problem as ``{"error": text}``: the first of several reasons, and the number of others."""
    fault = problem.faults[0] if problem.faults else Fault(problem.detail, problem.hint)
    row = f"row {fault.input}: " if fault.input is not None else ""
    more = f" (and {len(problem.faults) - 1} more)" if len(problem.faults) > 1 else ""
    hint = f"; {fault.hint[:MAX_DETAIL]}" if fault.hint else ""
    text = f"{row}{problem.detail[:MAX_DETAIL]}{hint}{more}"
    status = STATUS.get(problem.status, problem.status)
    return Response(orjson.dumps({"error": text}), status, problem.headers, "application/json")
