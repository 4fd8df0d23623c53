"""Equal fingerprints mean equal numbers, wherever a model's own code keeps them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.own_models.ask import Asker, Json, serving_models
from tests.own_models.identities_of import identify, spec_of

SERVED = ("quantized", "Attribute", "Numpy", "ListOfLists", "InDict", "Private", "Helper", "Extra", "Closure")
MORE = (
    *("NestedClosure", "Partial", "BoundMethod", "SlotsHelper", "Dataclass", "EnumMember", "GlobalTensor"),
    *("GlobalNumber", "ImportedTensor", "ImportedLater", "OfClass", "NumpyScalar", "Sets", "Unregistered"),
    *("ReplacedForward", "TwoLambdas", "OwnHook", "Sparse", "Quantized", "UnsavedState", "parametrized", "traced"),
    *("Scripted", "Generated", "Containers", "Seeded", "OnTensors"),
)
PLAIN = ("Harmless",)
UNPROVEN = ("Unproven", "ImportsUnknown")
TABLES = 'import pathlib, torch\nTABLE = torch.eye(8) * int(pathlib.Path(__file__).with_name("seed.txt").read_text())\n'
ROW = torch.ones(8)
NAMES = (*SERVED, *MORE, *PLAIN, *UNPROVEN)
# That of ``quantized`` may come through: models are measured in other threads, whose filters of warnings undo its own.
pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")


def write_version(folder: Path, seed: int) -> Path:
    """A folder with the same code as the others, and a seed."""
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("fingerprints_nets.py"), folder / "net.py")
    for name in ("fingerprints_tables", "fingerprints_more"):
        (folder / f"{name}.py").write_text(TABLES)
    (folder / "seed.txt").write_text(str(seed))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions, and the first one somewhere else."""
    root = tmp_path_factory.mktemp("versions")
    return {name: write_version(root / name, seed) for name, seed in (("one", 1), ("two", 2), ("again", 1))}


@pytest.fixture(scope="module")
def identities(folders: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """What each folder's nets are identified by; of one in a process of its own, where sets have another order."""
    process = subprocess.Popen(
        [sys.executable, "-m", identify.__module__, str(folders["again"]), *NAMES],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    import_module("wave")  # which the other process does not
    found = {name: identify(folders[name], NAMES) for name in ("one", "two")}
    return {**found, "again": json.loads(process.communicate()[0])}


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    """A server of both versions of some, and of a model that can't be read."""
    root = tmp_path_factory.mktemp("served")
    folders = {name: write_version(root / name, seed) for name, seed in (("one", 1), ("two", 2))}
    specs = [spec_of(folder, name, f"{name}-{version}") for name in SERVED for version, folder in folders.items()]
    with serving_models(*specs, spec_of(folders["one"], "Unproven"), max_loaded_models=64) as asker:
        yield asker


@pytest.mark.parametrize("name", SERVED)
def test_other_numbers(asker: Asker, name: str) -> None:
    """Models that answer differently have different fingerprints, though their code and their layers are the same."""
    one, two = (asker.extract(f"{name}-{version}", [ROW], ["."]) for version in ("one", "two"))
    assert not torch.allclose(one.features["."], two.features["."])
    assert one.body["fingerprint"] != two.body["fingerprint"]
    assert not one.body["fingerprint"].startswith("unproven-")


@pytest.mark.parametrize("name", [*SERVED, *MORE])
def test_values(identities: Mapping[str, Mapping[str, str]], name: str) -> None:
    """Whatever a forward reads counts; a copy in another folder and another process has the same fingerprint."""
    assert identities["one"][name] == identities["again"][name] != identities["two"][name]
    assert not identities["one"][name].startswith("unproven-")


@pytest.mark.parametrize("name", PLAIN)
def test_harmless(identities: Mapping[str, Mapping[str, str]], name: str) -> None:
    """Locks, loggers, threads, paths and caches of functions do not count, and can stay unread."""
    assert len({each[name] for each in identities.values()}) == 1
    assert not identities["one"][name].startswith("unproven-")


@pytest.mark.parametrize("name", UNPROVEN)
def test_unread(identities: Mapping[str, Mapping[str, str]], name: str) -> None:
    """If a forward may read what nobody else can, no two loads have the same fingerprint."""
    found = {each[name] for each in identities.values()}
    assert len(found) == 3
    assert all(each.startswith("unproven-") for each in found)


def test_code(tmp_path: Path) -> None:
    """A constant that is edited in the model's own file counts."""
    folders = [write_version(tmp_path / name, 1) for name in ("one", "two")]
    text = (folders[1] / "net.py").read_text()
    (folders[1] / "net.py").write_text(text.replace("torch.eye(8) * _scale()", "torch.eye(8) * _scale() * 2"))
    one, two = (identify(folder, ["GlobalNumber"]) for folder in folders)
    assert one != two


def test_unproven(asker: Asker) -> None:
    """An unproven fingerprint says so in replies, and receipts, and stays until the model is loaded anew."""

    def ask(**more: Any) -> Json:
        return asker.extract("Unproven", [ROW], [".", "a"], **more).body

    def list_fingerprints(body: Json) -> list[str]:
        return [body["fingerprint"], *(receipt["fingerprint"] for receipt in body["receipts"].values())]

    first = list_fingerprints(ask())
    assert list_fingerprints(ask()) == first
    changes = [{"op": "zero", "layer": "a"}]
    changed = list_fingerprints(ask(interventions=changes))
    assert all(each.startswith("unproven-") for each in (*first, *changed))
    assert not set(first) & set(changed)
    for action in ("unload", "load"):
        assert asker.client.post(f"/models/Unproven/{action}").status_code < 300
    anew = list_fingerprints(ask())
    assert all(each.startswith("unproven-") for each in anew)
    assert not set(first) & set(anew)
