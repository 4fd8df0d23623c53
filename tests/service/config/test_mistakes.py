"""Mistakes of a configuration file: each is told with its line; those of fields before those that need their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.config.configuration import read_configuration
from layertap.service.config.file import ConfigError

MODEL = "models: [{{name: a, source: 'python:m:f', {}}}]"


def write_config(folder: Path, text: str, name: str = "models.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


BAD = {
    "": "mapping",
    "models: []": "at least 1",
    "models: [": "not YAML",
    "models: !!python/object/apply:os.system ['true']": "not YAML",
    "[" * 2000: "not YAML",
    "models: [{name: a, source: 'a:b'}]\ndefaults: {model: b}": "'b' is not among a",
    MODEL.format("preprocess: {std: [0.5, 0, 0.5]}"): "no std is 0",
    MODEL.format("preprocess: {resize: 64, crop: [64, -3]}"): "sizes are 1 or more",
    "models: [{name: a, source: 'a:b', tf32: true}, {name: b, source: 'a:b', device: cuda}]": "set it for b too",
    MODEL.format("decode: quick"): "models.0.decode: Input should be 'exact', 'fast' or 'device'",
    MODEL.format("decode: device, devices: ['cpu:0', 'cpu:1']"): "'a': decode: device is for models on a GPU",
    MODEL.format("device: cpu, devices: ['cpu:0']"): "'a': give device, or devices, not both",
    MODEL.format("decode: device, preprocess: {resize: 8, interpolation: lanczos}"): (
        "decode: device resizes by bicubic, bilinear, not by lanczos"
    ),
    MODEL.format(
        "warm: [{layers: [a], compile: alway}]"
    ): "models.0.warm.0.compile: Input should be False, True or 'always'",
    MODEL.format("warm: [{layers: [a], cuda_graphs: [1]}]"): "models.0.warm.0: cuda_graphs are of a compiled plan",
    MODEL.format(
        "warm: [{layers: [a], compile: true, cuda_graphs: [8, 0]}]"
    ): "models.0.warm.0: 'cuda_graphs' must be row counts",
    MODEL.format("device: cpu, warm: [{layers: [b]}, {layers: [a], compile: true, cuda_graphs: [8]}]"): (
        "'a': cuda_graphs is for models on a GPU"
    ),
    MODEL.format("int: 1"): "models.0.int: there is no such field",
    MODEL.format("'literal[x': 1"): "models.0.literal[x: there is no such field",
    MODEL.format("inputs: [{name: x, shape: [3], str: 1}]"): "models.0.inputs.0.str: there is no such field",
    MODEL.format("preprocess: {'tuple[': 1}"): "models.0.preprocess.tuple[: there is no such field",
}


@pytest.mark.parametrize("text", BAD)
def test_bad(tmp_path: Path, text: str) -> None:
    """What makes no sense is refused with the file's name and the place."""
    file = write_config(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_configuration(file)
    assert str(file) in caught.value.detail
    assert BAD[text] in caught.value.detail
    assert "_File" not in caught.value.detail


FIELDS = """models:
- {name: key, source: 'torchvision:vgg11', wieghts: random:0}
- {name: architecture, source: 'torchvision:resnet50', dtype: float33}
- {name: weights, source: 'torchvision:vgg11', preprocess: {crop: 8, std: [1]}}
- {nmae: unnamed, source: 'torchvision:vgg11'}
- torchvision:vgg11
"""
OF_FIELDS = [
    "2: models.0.wieghts: there is no such field; the nearest is 'weights'",
    "3: models.1.dtype: Input should be 'auto', 'float32', 'bfloat16', 'float16' or 'float64'",
    "4: models.2.preprocess: mean and std have a figure for each of three channels, of gray for the one",
    "5: models.3.name: Field required",
    "5: models.3.nmae: there is no such field; the nearest is 'name'",
    "6: models.4: this is no mapping of names to values",
]

ENTRIES = """models:
- {name: key, source: 'torchvision:vgg11'}
- {name: architecture, source: 'torchvision:resnet5O'}
- {name: kind, source: vgg11}
- {name: module, source: 'python:no_such_package_here.nets:build'}
- {name: file, source: 'torchvision:vgg11', weights: gone.pth}
- {name: key, source: 'torchvision:vgg11', weights: random:x}
- {name: unnamed, source: 'torchvision:vgg1l', device: tpu}
- {name: precision, source: 'torchvision:vgg11', tf32: true, dtype: float16}
- {name: placed, source: 'torchvision:vgg11', decode: device, device: cpu, embedding: 'a['}
- {name: 'a/b', source: 'torchvision:vgg11', warm: [{layers: ['b[']}]}
"""

ALONE = [  # that the file shows by itself
    "4: models.2.source: 'vgg11' has no kind",
    "7: models.5.name: two models are called 'key'",
    "9: models.7.tf32: model 'precision': tf32 is a way to compute in float32",
    "10: models.8.device: model 'placed': decode: device is for models on a GPU",
    "11: models.9.name: a name has 1 to 100 letters",
]

BESIDE = [  # that a look at the libraries and at the machine shows
    "3: models.1.source: torchvision has no architecture 'resnet5O'",
    "5: models.3.source: there is no Python module 'no_such_package_here'",
    "6: models.4.weights: there is no file",
    "7: models.5.weights: weights random:SEED needs a whole number",
    "8: models.6.device: 'tpu' is no device",
    "8: models.6.source: torchvision has no architecture 'vgg1l'",
    "10: models.8.embedding: the path in 'a[' is not closed",
    "11: models.9.warm.0.layers.0: the path in 'b[' is not closed",
]


@pytest.mark.parametrize(
    ("text", "before_loading", "expected"),
    [(FIELDS, True, OF_FIELDS), (ENTRIES, False, ALONE), (ENTRIES, True, ALONE + BESIDE)],
    ids=["fields", "entries", "before loading"],
)
def test_mistakes_together(tmp_path: Path, text: str, before_loading: bool, expected: list[str]) -> None:
    """No field hides another one, nor does an entry that can be read, whatever it takes to see it; by lines."""
    file = write_config(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_configuration(file, before_loading=before_loading)
    lines = [line.removeprefix(f"{file}:") for line in caught.value.detail.splitlines()]
    ordered = sorted(expected, key=lambda text: (int(text.partition(":")[0]), text))
    assert len(lines) == len(ordered), lines
    assert [line[: len(text)] for line, text in zip(lines, ordered, strict=True)] == ordered


UNLOADABLE = {
    "source: 'torchvison:resnet50'": "source: sources of kind 'torchvison' are not known; did you mean 'torchvision:",
    "source: 'timm:vit_smal_patch16_224.x'": "source: timm has no architecture",
    "source: 'transformers:nowhere'": "source: there is no directory",
    "source: 'transformers:adapter'": "source: 'adapter' holds a PEFT adapter",
    "source: 'torchvision:resnet50', devices: [tpu]": "devices: 'tpu' is no device",
    "source: 'torchvision:resnet50', devices: ['cuda:0', cpu]": "devices: devices are GPUs by their numbers, or all",
    "source: 'torchvision:resnet50', devices: [cuda, 'cuda:0']": "devices: a device is there twice",
    "source: 'torchvision:resnet50', load: lazy, weights: gone.pth": "weights: there is no file",
    "source: 'torchvision:resnet50', embedding: 'a:outptu'": "embedding: 'outptu' is no site",
}


@pytest.mark.parametrize("entry", UNLOADABLE)
def test_unloadable(tmp_path: Path, entry: str) -> None:
    """What no load could make good is refused before any, with its line."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").touch()
    file = write_config(tmp_path, f"models:\n- name: good\n  source: torchvision:vgg11\n- {{name: a, {entry}}}\n")
    assert len(read_configuration(file).models) == 2
    with pytest.raises(ConfigError) as caught:
        read_configuration(file, before_loading=True)
    (line,) = caught.value.detail.splitlines()
    assert line.startswith(f"{file}:4: models.1.{UNLOADABLE[entry]}")


TWICE = """models:
- {name: a, source: 'torchvision:vgg11', weights: 'random:0', weights: 'random:1'}
- &other {name: b, source: 'torchvision:vgg11'}
- {<<: *other, name: c}
- {<<: *other, name: d}
aliases: {prod: a}
aliases: {canary: b}
"""


def test_fields_that_are_there_twice(tmp_path: Path) -> None:
    """Of a field that is there twice nobody knows which is meant; what comes by a merge is there once."""
    file = write_config(tmp_path, TWICE)
    with pytest.raises(ConfigError) as caught:
        read_configuration(file)
    assert caught.value.detail.splitlines() == [
        f"{file}:2: models.0.weights: this is there twice",
        f"{file}:7: aliases: this is there twice",
    ]


def test_unreadable(tmp_path: Path) -> None:
    """A file that is not there, is a folder, or is not text is refused in words."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\0")
    for name in ("nowhere.yaml", "", "bytes"):
        with pytest.raises(ConfigError, match=r"read|not YAML"):
            read_configuration(tmp_path / name)


def test_aliases(tmp_path: Path) -> None:
    """Aliases are names, of models that there are, and the default is one of these."""
    text = "models: [{name: a, source: 'a:b'}]\ndefaults: {model: b}\naliases: {prod: c, '-': a, '../b': a}\n"
    with pytest.raises(ConfigError) as caught:
        read_configuration(write_config(tmp_path, text))
    assert [line.split(": ")[1] for line in caught.value.detail.splitlines()] == [
        *("defaults.model", "aliases.-", "aliases.../b", "aliases.prod")
    ]
    text = "models: [{name: a, source: 'a:b'}]\naliases: {BAAI/bge-m3: a, 'nomic:latest': a}\n"
    assert read_configuration(write_config(tmp_path, text)).aliases == {"BAAI/bge-m3": "a", "nomic:latest": "a"}
