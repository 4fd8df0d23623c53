"""``examples/retrieval``: what is found is the nearest, what is printed is so, what can't be compared is refused."""

from __future__ import annotations

import base64
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import average_precision_score

from bench.digits import load_splits
from tests.examples.printed import ROOT, environment, lay_out
from tests.server import serving

README = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
PREPARE = ".venv/bin/python examples/pictures.py out/pictures"
BULK = ".venv/bin/layertap bulk out/pictures/gallery --out out/index.parquet"
SEARCH = ".venv/bin/python examples/retrieval/search.py out/index.parquet examples/digit.png"
QUERIES = ".venv/bin/layertap bulk out/pictures/queries --out out/queries.parquet"
EVALUATE = ".venv/bin/python examples/retrieval/evaluate.py out/index.parquet out/queries.parquet"
COMMANDS = (PREPARE, BULK, SEARCH, QUERIES, EVALUATE)
LIMIT_S = 240

Array = NDArray[Any]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Folder:
    """A copy of the examples, with commands where the README has them, in which its own have run."""

    path: Path
    runs: dict[str, subprocess.CompletedProcess[str]]
    url: str

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=environment(),
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )

    def read(self, name: str) -> tuple[list[str], Array]:
        """The names and vectors of a file, by nothing of the example's."""
        table = pq.read_table(self.path / "out" / name)
        return table.column("key").to_pylist(), np.array(table.column("pool").to_pylist(), np.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    path = tmp_path_factory.mktemp("project")
    lay_out(path)
    with serving() as live:
        found = Folder(path, {}, live.url)
        for command in COMMANDS:
            found.runs[command] = found.run(command)
            assert found.runs[command].returncode == 0, found.runs[command].stderr
        yield found


@pytest.fixture
def index(folder: Folder, tmp_path: Path) -> Path:
    """A copy of the index to spoil, and none of what was made of it."""
    copy = tmp_path / "index.parquet"
    copy.write_bytes((folder.path / "out" / "index.parquet").read_bytes())
    return copy


def search(folder: Folder, index: Path, *words: str, pictures: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Search an index for pictures, the README's without; a server embeds them, which takes no start of torch."""
    asked = [str(each) for each in pictures or [Path("examples", "digit.png")]]
    page = str(index.with_suffix(".html"))
    return folder.run(
        shlex.join([*SEARCH.split()[:2], str(index), *asked, "--page", page, *(words or ("--url", folder.url))])
    )


def refused(run: subprocess.CompletedProcess[str], *parts: str) -> None:
    """A refusal: the reason, and no traceback."""
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("refused: ")
    assert "Traceback" not in run.stderr
    for part in parts:
        assert part in run.stderr


def rewrite(index: Path, **columns: list[Any]) -> None:
    """Put other values in columns of a file, and leave what it says of itself."""
    table = pq.read_table(index)
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    pq.write_table(table, index)


def rows(text: str) -> dict[str, list[float]]:
    """The rows of a printed table."""
    found = re.findall(r"^│ *(digits|photos|all) *│(.*)│ *$", text, re.MULTILINE)
    return {name: [float(cell.replace(",", "")) for cell in rest.split("│")] for name, rest in found}


def test_figures(folder: Folder) -> None:
    """Recall@1 and mAP are numpy's and scikit-learn's; those of digits are in the README, and better than pixels'."""
    figures = rows(folder.runs[EVALUATE].stdout)
    assert figures.keys() == {"digits", "photos", "all"}
    (keys, vectors), (asked, queries) = folder.read("index.parquet"), folder.read("queries.parquet")
    labels, wanted = (np.array([key.partition("-")[0] for key in each]) for each in (keys, asked))
    cosines = (queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    ).T
    for name, of_gallery, of_queries in (
        ("digits", np.char.isdigit(labels), np.char.isdigit(wanted)),
        ("photos", ~np.char.isdigit(labels), ~np.char.isdigit(wanted)),
        ("all", labels != "", wanted != ""),
    ):
        scores, right = cosines[of_queries][:, of_gallery], wanted[of_queries][:, None] == labels[of_gallery]
        recall = float(right[np.arange(len(right)), scores.argmax(axis=1)].mean())
        average = float(np.mean([average_precision_score(*each) for each in zip(right, scores, strict=True)]))
        printed = figures[name]
        assert printed[:2] == [of_gallery.sum(), of_queries.sum()]
        assert (printed[2], printed[4]) == pytest.approx((recall, average), abs=2e-3)
    shown = re.findall(r"0\.\d+", README)
    assert [float(each) for each in shown] == pytest.approx(
        [figures["digits"][index] for index in (2, 4, 3, 5)], abs=0.01
    )
    assert figures["digits"][2] >= 0.97
    assert figures["digits"][4] > figures["digits"][5] + 0.2


def test_nearest(folder: Folder) -> None:
    """What is printed is what comparing with every vector finds, with its cosine."""
    keys, vectors = folder.read("index.parquet")
    asked, queries = folder.read("queries.parquet")
    names = [asked[7], asked[-1]]
    paths = [folder.path / "out" / "pictures" / "queries" / name for name in names]
    run = search(folder, folder.path / "out" / "index.parquet", "--count", "5", "--url", folder.url, pictures=paths)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(f"{folder.path}/out/pictures/queries/")[1:]
    for name, text in zip(names, printed, strict=True):
        query = queries[asked.index(name)]
        cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        found = re.findall(r"^  (\S+)  (\S+)$", text, re.MULTILINE)
        assert len(found) == 5
        best = np.sort(cosines)[::-1][:5]
        np.testing.assert_allclose([float(cosine) for cosine, _ in found], best, atol=2e-4)
        for cosine, key in found:
            assert cosines[keys.index(key)] == pytest.approx(float(cosine), abs=2e-4)


def test_page(folder: Folder) -> None:
    """The page has the picture that was looked for, then those that were found, the nearest first."""
    text = (folder.path / "out" / "search.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img class="small" alt="([^"]*)" src="data:image/png;base64,([^"]*)">', text)
    found = re.findall(r"^  \S+  (\S+)$", folder.runs[SEARCH].stdout, re.MULTILINE)
    assert [name for name, _ in shown] == ["digit.png", *found]
    assert len(found) == 8
    assert all(name.startswith("2-") for name in found)
    files = [folder.path / "examples" / "digit.png"]
    files += [folder.path / "out" / "pictures" / "gallery" / name for name in found]
    for file, (_, data) in zip(files, shown, strict=True):
        drawn = Image.open(io.BytesIO(base64.b64decode(data)))
        assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(file).convert("RGB")))
    assert "<script" not in text
    assert folder.runs[SEARCH].stdout.splitlines()[0] == "examples/digit.png"


def test_names_on_the_page(folder: Folder, index: Path) -> None:
    """A name is text, whatever it is; a picture that is gone leaves its name."""
    hostile = '<img src=x onerror="alert(1)">&amp;.png'
    keys, _ = folder.read("index.parquet")
    rewrite(index, key=[hostile] * len(keys))
    run = search(folder, index)
    assert run.returncode == 0, run.stderr
    text = index.with_suffix(".html").read_text(encoding="utf-8")
    assert 'onerror="' not in text
    assert hostile in unescape(text)
    assert text.count("no picture") == 8


def test_index_holds_the_training_pictures(folder: Folder) -> None:
    """The digits in the index are what the model was trained on, by a direct request of these very tensors."""
    training, _ = load_splits()
    stream = io.BytesIO()
    np.save(stream, training.images.numpy()[:256])
    headers = {"Content-Type": "application/x-npy"}
    reply = httpx.post(f"{folder.url}/extract?format=npy", content=stream.getvalue(), headers=headers)
    wanted = np.load(io.BytesIO(reply.raise_for_status().content))
    keys, vectors = folder.read("index.parquet")
    digits = [key for key in keys if key[0].isdigit()]
    assert sorted(key[0] for key in digits) == sorted(str(label) for label in training.labels.tolist())
    distance = np.abs(vectors[None, : len(digits)] - wanted[:, None]).max(axis=2).min(axis=1)
    assert distance.max() < 1e-4


def test_index_follows_its_file(folder: Folder, index: Path) -> None:
    """A file that has changed is indexed again, one that has not is not; pictures without a vector are not found."""
    one = ("--count", "1", "--url", folder.url)
    first = search(folder, index, *one)
    table = index.with_suffix(".lancedb") / "vectors.lance" / "data"
    made = sorted(table.iterdir())
    assert search(folder, index, *one).stdout == first.stdout
    assert sorted(table.iterdir()) == made
    ((nearest,),) = [re.findall(r"^  \S+  (\S+)$", first.stdout, re.MULTILINE)]
    keys, vectors = folder.read("index.parquet")
    rewrite(index, pool=[None if key == nearest else row.tolist() for key, row in zip(keys, vectors, strict=True)])
    run = search(folder, index, *one)
    assert run.returncode == 0, run.stderr
    assert nearest not in run.stdout
    assert f"{len(keys) - 1} pictures" in run.stdout


def test_other_fingerprint(folder: Folder, index: Path) -> None:
    """A model that is not the index's any more is refused with the command that embeds again; so are two in a file."""
    table, other = pq.read_table(index), "0" * 32
    own, count = table.column("fingerprint")[0].as_py(), table.num_rows
    rewrite(index, fingerprint=[*[own] * (count - 1), other])
    refused(search(folder, index), f"has vectors of fingerprint {own} and of {other}")
    said = {key: value.replace(own.encode(), other.encode()) for key, value in table.schema.metadata.items()}
    pq.write_table(table.replace_schema_metadata(said), index)
    rewrite(index, fingerprint=[other] * count)
    refused(search(folder, index), f"was made with fingerprint {other}", "embeds its pictures again:\n", "--restart")


def test_what_can_not_be_used(folder: Folder, index: Path, tmp_path: Path) -> None:
    """A file of something else, and a picture that is none."""
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"key": ["a"]}), other)
    refused(search(folder, other), "is no file of vectors", "layertap bulk")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    refused(search(folder, index, pictures=[broken]), "broken.png: ")


def test_every_printed_command_is_run() -> None:
    """The README's commands of the search are those that are run here."""
    section = README[README.index("## A picture search") : README.index("## The pictures")]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines()] == list(COMMANDS)
