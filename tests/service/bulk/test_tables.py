"""Tables as pandas, datasets and Python write them: each is read, or the job ends with status 2 and says why."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import lancedb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.bulk.conftest import read
from tests.service.bulk.test_bulk import list_files
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import configured
from tests.transformers_nets import saved, tokenizer

TEXTS = ("a cat", "the dog sat on the mat", "a red dog", "")
POOL = ("--layers", "encoder.layer.0,encoder.layer.1", "--pool", "mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of texts."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    saved("bert", folder)
    tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bert(serve: Serve, model: Path) -> Iterator[tuple[str, ...]]:
    """Options for a server with the model."""
    with serve(configured(ModelSpec("bert", f"transformers:{model}", device="cpu"))) as live:
        yield ("--url", live.url, "--model", "bert", *POOL)


@pytest.fixture(scope="module")
def vectors(model: Path) -> list[list[float]]:
    """What the library gives for the texts, in the first layer."""
    net = transformers.AutoModel.from_pretrained(model).eval()
    words = transformers.AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        ran = [net(**words(text, return_tensors="pt"), output_hidden_states=True) for text in TEXTS]
    return [each.hidden_states[1][0].mean(0).tolist() for each in ran]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON Lines as Python's own writer makes them: with NaN, and integers of any size."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_odd_numbers(path: Path) -> Path:
    odd = (float("nan"), 2**64, -(2**200), float("inf"))
    return write_lines(path.with_suffix(".jsonl"), [{"x": x, "text": text} for x, text in zip(odd, TEXTS, strict=True)])


def write_categories(path: Path) -> Path:
    pd.DataFrame({"text": pd.Categorical(TEXTS), "n": range(4)}).to_parquet(path)
    return path


def write_dictionary(path: Path) -> Path:
    pq.write_table(
        pa.table({"text": pa.array(TEXTS).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string()))}), path
    )
    return path


def write_dataset(path: Path) -> Path:
    datasets.Dataset.from_dict({"text": list(TEXTS), "label": [0, 1, 0, 1]}).to_parquet(path)
    return path


@pytest.mark.parametrize("write", [write_odd_numbers, write_categories, write_dictionary, write_dataset])
def test_texts(command: Command, bert: tuple[str, ...], vectors: Any, tmp_path: Path, write: Any) -> None:
    """Whatever stands beside a text, and however its column is stored, it has the vector that the library gives."""
    out = tmp_path / "out.parquet"
    done = command("bulk", write(tmp_path / "texts.parquet"), "--column", "text", *bert, "--out", out)
    assert done.status == 0, done.notes
    rows = read(out)
    assert rows["error"] == [None] * 4
    np.testing.assert_allclose(rows["encoder.layer.0"], vectors, atol=1e-5)


def test_tokens(command: Command, bert: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    """A store of token activations holds what the library gives, text by text; layers may be objects, as JSON."""
    source = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    layers = [{"layer": "encoder.layer.?", "dtype": "float16"}, "encoder.layer.1.output.dense"]
    out = tmp_path / "tokens"
    words = ("--column", "text", *bert[:4], "--format", "safetensors", "--out")
    done = command("bulk", source, "--layers", json.dumps(layers), *words, out)
    assert done.status == 0, done.notes
    net = transformers.AutoModel.from_pretrained(model).eval()
    tokenize = transformers.AutoTokenizer.from_pretrained(model)
    hooks = {name: net.get_submodule(name) for name in ("encoder.layer.0", "encoder.layer.1", layers[1])}
    arrays = load_file(out / "part-000000000000.safetensors")
    for name, part in hooks.items():
        seen: list[torch.Tensor] = []
        handle = part.register_forward_hook(
            lambda _, args, output, seen=seen: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        with torch.no_grad():
            for text in TEXTS:
                net(**tokenize(text, return_tensors="pt"))
        handle.remove()
        assert arrays[name].dtype == (np.float32 if name == layers[1] else np.float16)
        starts = arrays[f"{name}.starts"]
        for number, row in enumerate(read(out / "part-000000000000.parquet")["row"]):
            found = arrays[name][starts[row] : starts[row + 1]]
            np.testing.assert_allclose(found, seen[number].reshape(-1, found.shape[1]), atol=2e-3)
    assert "no JSON" in command("bulk", source, "--layers", "[{", *words, tmp_path / "none").notes


def test_lines_that_are_none(command: Command, bert: tuple[str, ...], tmp_path: Path) -> None:
    """Lines without a text have a reason; where no line has one, the status is 2, also when the command is repeated."""
    bad = [
        "{",
        "[1]",
        '"text"',
        "[" * 100_000,
        '{"text": "\\ud800"}',
        '{"text": null}',
        '{"other": "a"}',
        '{"text": 7}',
    ]
    source, out = tmp_path / "bad.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join([*bad, '{"text": "a cat"}']), encoding="utf-8")
    words = ("--column", "text", *bert, "--out")
    assert command("bulk", source, *words, out).status == 0
    assert [error is None for error in read(out)["error"]] == [False] * len(bad) + [True]
    source.write_text("\n".join(bad), encoding="utf-8")
    for _ in range(2):
        done = command("bulk", source, *words, tmp_path / "none.parquet")
        assert (done.status, "no input has a result" in done.notes) == (2, True)
    source.write_text('{"body": "a cat"}')
    done = command("bulk", source, *words, tmp_path / "other.parquet")
    assert (done.status, "has no field 'text'" in done.notes) == (2, True)


def test_paths(command: Command, live: Live, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of pictures in a column, or in datasets' structs without bytes, are read where ``--paths`` says so."""
    monkeypatch.chdir(folder)
    files = [str(file.relative_to(folder)) for file in list_files(folder)[:4]]
    pq.write_table(pa.table({"file": files}), tmp_path / "strings.parquet")
    pq.write_table(pa.table({"file": [{"bytes": None, "path": file} for file in files]}), tmp_path / "structs.parquet")
    write_lines(tmp_path / "lines.jsonl", [{"file": file} for file in [*files, "nowhere.png"]])
    (tmp_path / "list.txt").write_text("\n".join(files))
    assert command("bulk", tmp_path / "list.txt", "--url", live.url, "--out", tmp_path / "list.parquet").status == 0
    wanted = read(tmp_path / "list.parquet")
    for source in ("strings.parquet", "structs.parquet", "lines.jsonl"):
        out = tmp_path / f"{source}.out.parquet"
        words = ("bulk", tmp_path / source, "--column", "file", "--url", live.url, "--out", out)
        done = command(*words)
        assert done.status == 2, source  # texts, or without bytes
        assert command(*words, "--paths", "--restart").status == 0
        found = read(out)
        for name in ("digest", "pool", "fingerprint"):
            assert found[name][:4] == wanted[name], source
    assert "No such file" in found["error"][4]


def test_datasets_without_bytes(command: Command, folder: Path, tmp_path: Path) -> None:
    """A data set of pictures that keeps them in files of their own, as the datasets library writes it."""
    files = [str(file) for file in list_files(folder)[:3]]
    pictures = datasets.Dataset.from_dict({"image": files}).cast_column("image", datasets.Image())
    pictures.to_parquet(tmp_path / "pictures.parquet")
    words = ("bulk", tmp_path / "pictures.parquet", "--out", tmp_path / "out.parquet")
    assert command(*words, "--paths").status == 0
    assert read(tmp_path / "out.parquet")["error"] == [None] * 3


def test_kept_columns(command: Command, bert: tuple[str, ...], tmp_path: Path) -> None:
    """Columns of the source stand beside the results, in their own types, also in rows without one."""
    when = [datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 2, 3, 4)]
    table = pa.table(
        {
            "id": pa.array([7, 8, None, 2**60], pa.int64()),
            "text": pa.array([*TEXTS[:3], None]).dictionary_encode(),
            "when": pa.array(when, pa.timestamp("ns", "UTC")),
            "tags": [["a"], [], None, ["b", "c"]],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    names = ("id", "text", "when", "tags")
    words = ("bulk", tmp_path / "t.parquet", "--column", "text", *bert, "--keep", ",".join(names))
    assert command(*words, "--out", tmp_path / "out.parquet").status == 0
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column_names[:6] == ["key", "digest", *names]
    assert found.select(names).to_pydict() == table.to_pydict()
    assert [str(found.schema.field(name).type) for name in names] == [
        "int64", "string", "timestamp[ns, tz=UTC]", "list<element: string>"
    ]  # fmt: skip
    assert [error is None for error in found["error"].to_pylist()] == [True, True, True, False]
    assert command(*words, "--out", tmp_path / "folder").status == 0
    (part,) = (tmp_path / "folder").glob("part-*.parquet")
    assert pq.read_table(part).select(names).to_pydict() == table.to_pydict()
    done = command(*words[:-1], "id", "--out", tmp_path / "out.parquet")
    assert (done.status, "was made with keep" in done.notes) == (2, True)


def test_kept_fields(command: Command, bert: tuple[str, ...], tmp_path: Path) -> None:
    """Fields of JSON are kept as text: there strings are themselves, and all else is what JSON writes."""
    rows = [
        {"id": 2**70, "text": "a cat"},
        {"id": "b", "text": "a dog"},
        {"text": "a"},
        {"id": {"a": [1.5]}, "text": 1},
    ]
    source, out = write_lines(tmp_path / "t.jsonl", [*rows, [], {"id": "\ud800"}]), tmp_path / "out.parquet"
    assert command("bulk", source, "--column", "text", "--keep", "id", *bert, "--out", out).status == 0
    found = read(out)
    assert found["id"] == [str(2**70), "b", None, '{"a": [1.5]}', None, "?"]
    assert [error is None for error in found["error"]] == [True, True, True, False, False, False]


def test_a_vector_store(command: Command, bert: tuple[str, ...], vectors: Any, tmp_path: Path) -> None:
    """LanceDB, which takes no names with dots, finds a text by the column that ``--as`` has named."""
    source = write_lines(tmp_path / "t.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate(TEXTS)])
    out = tmp_path / "out.parquet"
    words = ("bulk", source, "--column", "text", *bert, "--keep", "id,text", "--out", out)
    assert command(*words, "--as", "vector,second").status == 0
    store = lancedb.connect(tmp_path / "store").create_table("texts", pq.read_table(out))
    for number, vector in enumerate(vectors):
        (nearest,) = store.search(vector, vector_column_name="vector").limit(1).to_list()
        assert (nearest["id"], nearest["text"]) == (f"d{number}", TEXTS[number])
    checked = command("check", out, *bert[:4])
    assert (checked.status, "vector: same" in checked.out) == (0, True), checked.out + checked.notes
    done = command(*words, "--as", "vector,other")
    assert (done.status, "--restart" in done.notes) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--as", "one"), "for 2 results: encoder.layer.0, encoder.layer.1"),
        (("--as", "same,same"), "may be called 'same'"),
        (("--as", "id,b", "--keep", "id"), "may be called 'id'"),
        (("--keep", "key"), "may be called 'key'"),
        (("--keep", "text,nothing"), "has no column 'nothing'"),
        (("--as", "a,b", "--reduce", "top", "--out", "o"), "takes no --pool"),
    ],
)
def test_names_that_cannot_be(
    command: Command, bert: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, says: str
) -> None:
    """Too few names, one twice, or one that is taken: a line that says so before anything is written."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": TEXTS, "id": [1, 2, 3, 4], "key": [1, 2, 3, 4]}), "t.parquet")
    done = command("bulk", "t.parquet", "--column", "text", *bert, "--out", "o.parquet", *words)
    assert (done.status, says in " ".join(done.notes.split())) == (2, True), done.notes
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
