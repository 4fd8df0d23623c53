"""What ``examples/README.md`` prints runs as printed: replies are the server's, and a search finds the nearest."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import takewhile
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

from tests.examples.printed import ROOT, Project, open_project, read_blocks
from tests.service.cli.commands import Done

README = ROOT / "examples" / "README.md"
PICTURES = [(ROOT / "examples" / name).read_bytes() for name in ("digit.png", "digit-0.png")]
SHELL = "bash examples/extract.sh"
PYTHON = ".venv/bin/python examples/extract.py"
SEARCH = ".venv/bin/python examples/retrieval/search.py"
EVALUATE = ".venv/bin/python examples/retrieval/evaluate.py out/index.parquet out/queries.parquet"
DRAW = ".venv/bin/python examples/pictures.py"
EMBEDDING = {"layers": "pool", "pool": "flatten", "normalize": "true", "format": "npy"}
NO_SERVER = "http://127.0.0.1:1"

Array = NDArray[Any]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with open_project(tmp_path_factory.mktemp("project")) as opened:
        opened.start()
        yield opened


@pytest.fixture(scope="module")
def printed(project: Project) -> dict[str, str]:
    """Each of the README's commands for the first server, run once in the README's order, and what it printed."""
    commands = takewhile(lambda command: "tiny" not in command, (block.command for block in read_blocks(README)))
    lines = [line for command in commands for line in command.splitlines()]
    return {line: project.run(f"{line}\n") for line in lines}


# Requests


def embed(project: Project, *pictures: bytes) -> Array:
    """The vectors by a request of the test's own."""
    files = [("images", ("x", each)) for each in pictures]
    reply = httpx.post(f"{project.url}/extract", params=EMBEDDING, files=files)
    return np.load(io.BytesIO(reply.raise_for_status().content))


def test_shell(project: Project, printed: dict[str, str]) -> None:
    """The three forms by curl give what a request of one's own gives."""
    replies = [json.loads(line) for line in printed[SHELL].splitlines() if line.startswith("{")]
    raw, multipart, encoded = (reply["features"] for reply in replies)
    assert np.argmax(raw["head"]["data"]) == 2
    assert raw["block1"]["shape"] == [1, 16]
    assert np.argmax(multipart["head"]["data"], axis=1).tolist() == [2, 0]
    assert multipart["few"]["shape"] == [2, 4]
    vector = np.frombuffer(base64.b64decode(encoded["pool"]["data"]), "<f4").reshape(encoded["pool"]["shape"])
    np.testing.assert_allclose(vector, embed(project, PICTURES[0]), rtol=1e-5, atol=1e-6)


def test_python(project: Project, printed: dict[str, str]) -> None:
    """The script's vectors, layers, receipts and refusals are the server's."""
    text = printed[PYTHON]
    one, other = embed(project, *PICTURES)
    (cosine,) = re.findall(r"cosine of the two: (.*)", text)
    assert float(cosine) == pytest.approx(one @ other, abs=2e-4)
    assert re.search(r"^  block2\.conv1 +\(2, 32\)$", text, re.MULTILINE)
    assert "captured [2, 64, 8, 8], pool none" in text
    assert "1 row; input 1: " in text
    assert "there is no layer 'blok3'\n  did you mean 'block3'" in text


def test_no_server(project: Project) -> None:
    """``--url`` outranks the environment, and without a server a script says in one line how to start one."""
    done = project.try_to_run(f"{PYTHON} --url {NO_SERVER}\n")
    assert done.status == 1
    assert done.notes == "no layertap answers there: start one with `make serve`, or name it with --url\n"


def test_pictures_are_drawn_again(project: Project, printed: dict[str, str]) -> None:
    """The script that draws the pictures gives the pixels of those that are kept."""
    assert printed[DRAW].splitlines() == ["digit.png: a 2", "digit-0.png: a 0"]
    for name, kept in zip(("digit.png", "digit-0.png"), PICTURES, strict=True):
        with Image.open(project.path / "examples" / name) as drawn:
            assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(io.BytesIO(kept))))


def test_other_kinds(tmp_path: Path) -> None:
    """The tiny models are written and served, and a request to each has an answer of its kind."""
    with open_project(tmp_path) as tiny:
        write, serve, ask = (block.command for block in read_blocks(README) if "tiny" in block.command)
        tiny.run(write)
        tiny.run(serve)
        ranks, *replies = map(json.loads, tiny.run(ask).splitlines())
        assert len(ranks["results"]) == 2
        sparse, late, sound = (next(iter(reply["features"].values())) for reply in replies)
        assert len(sparse["data"][0]["indices"]) < sparse["shape"][1]
        assert late["shape"][2:] == [8]
        assert sound["shape"] == [1, 32]


# A picture search


@pytest.fixture
def index(project: Project, printed: dict[str, str], tmp_path: Path) -> Path:
    """A copy of the index to spoil, and none of what was made of it."""
    return Path(shutil.copy(project.path / "out" / "index.parquet", tmp_path))


def read_vectors(file: Path) -> tuple[list[str], Array]:
    """The names and vectors of a file, by nothing of the example's."""
    table = pq.read_table(file)
    return table.column("key").to_pylist(), np.array(table.column("pool").to_pylist(), np.float64)


def search(project: Project, index: Path, *words: str, pictures: Sequence[Path] = ()) -> Done:
    """Search an index for pictures, the README's without; a server embeds them."""
    asked = [str(each) for each in pictures or [Path("examples", "digit.png")]]
    page = str(index.with_suffix(".html"))
    options = shlex.join([str(index), *asked, "--page", page, "--url", project.url, *words])
    return project.try_to_run(f"{SEARCH} {options}\n")


def refused(done: Done, *parts: str) -> None:
    """A refusal: the reason, and no traceback."""
    assert (done.status, done.out) == (1, "")
    assert done.notes.startswith("refused: ")
    assert "Traceback" not in done.notes
    assert [part for part in parts if part not in done.notes] == []


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


def test_figures(project: Project, printed: dict[str, str]) -> None:
    """Recall@1 and mAP are numpy's and scikit-learn's; those of digits are in the README, and better than pixels'."""
    figures = rows(printed[EVALUATE])
    assert figures.keys() == {"digits", "photos", "all"}
    (keys, vectors), (asked, queries) = (read_vectors(project.path / f"out/{name}.parquet") for name in FILES)
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
        figure = figures[name]
        assert figure[:2] == [of_gallery.sum(), of_queries.sum()]
        assert (figure[2], figure[4]) == pytest.approx((recall, average), abs=2e-3)
    shown = [float(each) for each in re.findall(r"0\.\d+", README.read_text(encoding="utf-8"))]
    assert shown == pytest.approx([figures["digits"][index] for index in (2, 4, 3, 5)], abs=0.01)
    assert figures["digits"][2] >= 0.97
    assert figures["digits"][4] > figures["digits"][5] + 0.2


FILES = ("index", "queries")


def test_nearest(project: Project, index: Path) -> None:
    """What is printed is what comparing with every vector finds, with its cosine."""
    (keys, vectors), (asked, queries) = read_vectors(index), read_vectors(project.path / "out/queries.parquet")
    names = [asked[7], asked[-1]]
    folder = project.path / "out" / "pictures" / "queries"
    done = search(project, index, "--count", "5", pictures=[folder / name for name in names])
    assert done.status == 0, done.notes
    for name, text in zip(names, done.out.split(f"{folder}/")[1:], strict=True):
        query = queries[asked.index(name)]
        cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        found = re.findall(r"^  (\S+)  (\S+)$", text, re.MULTILINE)
        np.testing.assert_allclose([float(cosine) for cosine, _ in found], np.sort(cosines)[::-1][:5], atol=2e-4)
        for cosine, key in found:
            assert cosines[keys.index(key)] == pytest.approx(float(cosine), abs=2e-4)


def test_page(project: Project, printed: dict[str, str]) -> None:
    """The page has the picture that was looked for, then those that were found, the nearest first."""
    text = (project.path / "out" / "search.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img class="small" alt="([^"]*)" src="data:image/png;base64,([^"]*)">', text)
    (output,) = (printed[line] for line in printed if line.startswith(SEARCH))
    found = re.findall(r"^  \S+  (\S+)$", output, re.MULTILINE)
    assert [name for name, _ in shown] == ["digit.png", *found]
    assert len(found) == 8
    assert all(name.startswith("2-") for name in found)
    files = [project.path / "examples" / "digit.png"]
    files += [project.path / "out" / "pictures" / "gallery" / name for name in found]
    for file, (_, data) in zip(files, shown, strict=True):
        drawn = Image.open(io.BytesIO(base64.b64decode(data)))
        assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(file).convert("RGB")))
    assert "<script" not in text


def test_names_on_the_page(project: Project, index: Path) -> None:
    """A name is text, whatever it is; a picture that is gone leaves its name."""
    hostile = '<img src=x onerror="alert(1)">&amp;.png'
    rewrite(index, key=[hostile] * pq.read_metadata(index).num_rows)
    done = search(project, index)
    assert done.status == 0, done.notes
    text = index.with_suffix(".html").read_text(encoding="utf-8")
    assert 'onerror="' not in text
    assert hostile in unescape(text)
    assert text.count("no picture") == 8


def test_other_fingerprint(project: Project, index: Path) -> None:
    """A model that is not the index's any more is refused with the command that embeds again; so are two in a file."""
    table, other = pq.read_table(index), "0" * 32
    own, count = table.column("fingerprint")[0].as_py(), table.num_rows
    rewrite(index, fingerprint=[*[own] * (count - 1), other])
    refused(search(project, index), f"has vectors of fingerprint {own} and of {other}")
    said = {key: value.replace(own.encode(), other.encode()) for key, value in table.schema.metadata.items()}
    pq.write_table(table.replace_schema_metadata(said), index)
    rewrite(index, fingerprint=[other] * count)
    refused(search(project, index), f"was made with fingerprint {other}", "embeds its pictures again:\n", "--restart")


def test_what_can_not_be_used(project: Project, index: Path, tmp_path: Path) -> None:
    """A file of something else, and a picture that is none."""
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"key": ["a"]}), other)
    refused(search(project, other), "is no file of vectors", "layertap bulk")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    refused(search(project, index, pictures=[broken]), "broken.png: ")
