"""What tests of sounds and of videos share: files at an address, the library's values of layers, bulk jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pyarrow.parquet as pq

from tests.oracle import Key
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.support import Array, Json, arrays_of

HIDDEN = ".[last_hidden_state]"


class Files(SimpleHTTPRequestHandler):
    """Serves the files of a directory."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    """The address at which a folder's files are until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def close(found: Array, expected: Array) -> None:
    """The same shape, and the same values but for rounding."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def check_values(reply: httpx.Response, expected: Mapping[Key, Array]) -> Json:
    """Each layer has the values that hooks on the library's model see; the receipts."""
    found, receipts = arrays_of(reply), reply.json()["receipts"]
    assert len(found) > 10
    for key, values in found.items():
        path = tuple(part.rstrip("]") for part in receipts[key].get("path", "").split("[")[1:])
        place = receipts[key]["layer"], receipts[key]["call"]
        paths = [of[2] for of in expected if (*of[:2], of[3]) == (*place, "output")]
        close(values, expected[(*place, path if path in paths else paths[0], "output")])
    return receipts


def check_bulk(
    command: Command, work: Path, model: Path, files: Mapping[str, tuple[bytes, Array]], bad: str, live: Live | None
) -> None:
    """A folder of files becomes a row for each, asked of a server or here; the bad one has its reason.

    ``work`` is an empty folder, ``model`` that of a model with its name; ``files`` are contents and hidden states.
    """
    source, out, config = work / "source", work / "out.parquet", work / "models.yaml"
    source.mkdir()
    for file, (data, _) in files.items():
        (source / file).write_bytes(data)
    (source / bad).write_bytes(b"nothing of the kind")
    config.write_text(f"models:\n  - name: {model.name}\n    source: transformers:{model}\n", "utf-8")
    where = ("--config", config) if live is None else ("--url", live.url)
    done = command("bulk", source, "--model", model.name, "--layers", HIDDEN, "--pool", "mean", *where, "--out", out)
    assert done.status == 0, done.notes
    rows = pq.read_table(out).to_pydict()
    assert rows["key"] == [*files, bad]
    assert [error is None for error in rows["error"]] == [*(True for _ in files), False]
    for row, (_, hidden) in enumerate(files.values()):
        close(np.array([rows[HIDDEN][row]]), hidden.mean(1))
