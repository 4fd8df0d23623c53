"""Architectures and their weights, from each source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models

from layertap.models.check import list_architectures
from layertap.models.errors import LoadError
from layertap.models.grammar import parse_weights
from layertap.models.inputs.presets import from_torchvision
from layertap.models.loading import load_model
from layertap.models.run.fingerprint import digest_architecture
from layertap.models.sources.build import BuiltModel, build_model
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.marks import slow
from tests.transformers_nets import TEXT, saved

VECTOR = (InputSpec("x", (4,)),)


def built(source: str, weights: str | Path = "random:0", **fields: object) -> BuiltModel:
    return build_model(ModelSpec("m", source, str(weights), **fields))


def refusal(source: str, weights: str | Path = "random:0", **fields: object) -> str:
    """What a refusal says, without a path."""
    with pytest.raises(LoadError) as caught:
        built(source, weights, **fields)
    said = f"{caught.value.detail} | {caught.value.hint}"
    assert "/" not in said
    return said


def seeded_model(name: str, seed: int = 0, **options: object) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_model(name, weights=None, **options).eval()


def save(module: nn.Module, path: Path) -> Path:
    state = module.state_dict()
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of torch's downloads, and a closed port for the way out."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    files = tmp_path / "torch" / "hub" / "checkpoints"
    files.mkdir(parents=True)
    return files


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's module, importable as ``operators_models``."""
    (tmp_path / "operators_models.py").write_text(
        "from torch import nn\n"
        "def linear():\n    return nn.Linear(4, 2)\n"
        "def broken():\n    raise FileNotFoundError('/secret/place')\n"
        "class Scaled(nn.Module):\n    def forward(self, x, by):\n        return x * by\n"
        "def scaled():\n    return Scaled()\n"
        "def linear_of(width, bias=True):\n    return nn.Linear(4, width, bias=bias)\n"
        "def tokens():\n    module = nn.Linear(4, 2)\n    module.num_prefix_tokens = 5\n    return module\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["mobilenet_v3_small", slow("r3d_18")])
def test_seeded_weights_are_the_architectures_own(name: str) -> None:
    """random:SEED is what get_model gives after manual_seed(SEED), every time, and another seed is another model."""
    first = built(f"torchvision:{name}", "random:3")
    assert (
        digest_weights(first.module)
        == digest_weights(seeded_model(name, 3))
        == digest_weights(built(f"torchvision:{name}", "random:3").module)
    )
    assert digest_weights(first.module) != digest_weights(built(f"torchvision:{name}", "random:4").module)
    assert first.weights == "random:3"


@pytest.mark.parametrize(
    ("name", "shape", "out", "prefix", "images"),
    [
        ("squeezenet1_1", (3, 224, 224), (1, 1000), 0, True),
        slow("vit_b_32", (3, 224, 224), (1, 1000), 1, True),
        slow("r3d_18", (3, 16, 112, 112), (1, 400), 0, True),
    ],
)
def test_input_is_what_the_model_takes(
    name: str, shape: tuple[int, ...], out: tuple[int, ...], prefix: int, images: bool
) -> None:
    """The stated input goes through the model, and videos and class tokens are known."""
    model = built(f"torchvision:{name}")
    assert model.inputs == (InputSpec("x", shape),)
    assert tuple(model.module(torch.zeros(1, *shape)).shape) == out
    assert (model.prefix_tokens, model.preprocess is not None) == (prefix, images)
    assert model.architecture == f"torchvision:{name}"


def test_default_weights_come_from_torchs_cache(cache: Path) -> None:
    """DEFAULT and an enum's name load torchvision's file and are labelled with the enum's full name."""
    member = get_model_weights("squeezenet1_1").DEFAULT
    module = seeded_model("squeezenet1_1", 8)
    save(module, cache / member.url.rpartition("/")[2])
    for weights in ("DEFAULT", "IMAGENET1K_V1", "SqueezeNet1_1_Weights.IMAGENET1K_V1"):
        model = built("torchvision:squeezenet1_1", weights)
        assert model.weights == "SqueezeNet1_1_Weights.IMAGENET1K_V1"
        assert digest_weights(model.module) == digest_weights(module)
        assert model.preprocess == from_torchvision(member.transforms())


def test_cached_file_with_code_is_refused(cache: Path, tmp_path: Path) -> None:
    """A file in torch's cache that would run code when unpickled is refused; where there is none, it is said so."""
    said = refusal("torchvision:resnet18", "DEFAULT")
    assert "could not be downloaded" in said
    assert "random:SEED" in said
    member = get_model_weights("resnet18").DEFAULT
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    torch.save({"fc.weight": Trap()}, cache / member.url.rpartition("/")[2])
    assert "could not be loaded" in refusal("torchvision:resnet18", "DEFAULT")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("mnasnet0_5", ".safetensors"), slow("googlenet", ".pth"), slow("lraspp_mobilenet_v3_large", ".safetensors")],
)
def test_checkpoint_of_an_unreleased_model_gives_that_model(tmp_path: Path, name: str, suffix: str) -> None:
    """A state dict of ``get_model(name, weights=None)`` loads, computes the same, and shows only its file's name."""
    options = {"init_weights": True} if name == "googlenet" else {}
    options |= {"weights_backbone": None} if name.startswith("lraspp") else {}
    module = seeded_model(name, 1, **options)
    model = built(f"torchvision:{name}", save(module, tmp_path / f"mine{suffix}"))
    assert model.weights == f"mine{suffix}"
    assert digest_weights(model.module) == digest_weights(module)
    image = torch.rand(2, 3, 96, 96)
    with torch.inference_mode():
        expected, result = module(image), model.module(image)
    if isinstance(expected, dict):
        expected, result = expected["out"], result["out"]
    assert torch.equal(expected, result)


@pytest.mark.slow
def test_released_file_is_built_as_torchvision_builds_it(cache: Path, tmp_path: Path) -> None:
    """Released weights, by name or by a copy of their file, get the input scaling and heads that torchvision gives."""
    name = "googlenet"
    member = get_model_weights(name).DEFAULT
    file = member.url.rpartition("/")[2]
    save(seeded_model(name, 2, init_weights=True, aux_logits=True), cache / file)
    (tmp_path / file).write_bytes((cache / file).read_bytes())
    expected = get_model(name, weights=member, progress=False).eval()
    for weights in ("DEFAULT", tmp_path / file):
        module = built(f"torchvision:{name}", weights).module
        assert digest_weights(module) == digest_weights(expected)
        assert [part for part, _ in module.named_modules()] == [part for part, _ in expected.named_modules()]
        image = torch.rand(1, 3, 128, 128)
        with torch.inference_mode():
            assert torch.equal(module(image), expected(image))


@pytest.mark.slow
def test_densenets_old_names_are_read(tmp_path: Path) -> None:
    """DenseNet's released files, whose names have a dot too many, load from a path."""
    module = seeded_model("densenet121", 2)
    dotted = {"norm1.": "norm.1.", "norm2.": "norm.2.", "conv1.": "conv.1.", "conv2.": "conv.2."}
    old = {}
    for name, value in module.state_dict().items():
        block, layer, rest = name.partition("denselayer")
        for new, before in dotted.items():
            rest = rest.replace(new, before)
        old[block + layer + rest] = value
    assert old.keys() != module.state_dict().keys()
    torch.save(old, tmp_path / "densenet121-a639ec97.pth")
    assert digest_weights(
        built("torchvision:densenet121", tmp_path / "densenet121-a639ec97.pth").module
    ) == digest_weights(module)


@pytest.mark.slow
def test_transformer_takes_the_size_of_its_positions(tmp_path: Path) -> None:
    """A vision transformer's checkpoint says for which image size it is, and input and preprocessing follow."""
    module = seeded_model("vit_b_32", 1, image_size=96)
    model = built("torchvision:vit_b_32", save(module, tmp_path / "small.safetensors"))
    assert model.inputs[0].shape == (3, 96, 96)
    assert model.preprocess is not None
    assert (model.preprocess.resize, model.preprocess.crop) == (96, 96)
    assert model.module(torch.zeros(1, 3, 96, 96)).shape == (1, 1000)


@pytest.mark.parametrize(("ident", "prefix"), [("test_vit", 1), slow("deit_tiny_distilled_patch16_224", 2)])
def test_timm_model_with_its_own_facts(ident: str, prefix: int) -> None:
    """A timm model takes the input of its configuration, and its prefix tokens are counted."""
    model = built(f"timm:{ident}", "random:3")
    assert model.preprocess is not None
    assert model.inputs == (InputSpec("x", tuple(model.module.pretrained_cfg["input_size"])),)
    assert model.module(torch.zeros(1, *model.inputs[0].shape)).shape[0] == 1
    assert model.prefix_tokens == prefix == getattr(model.module, "num_prefix_tokens", 0)
    assert digest_weights(model.module) == digest_weights(built(f"timm:{ident}", "random:3").module)
    assert digest_weights(model.module) != digest_weights(built(f"timm:{ident}", "random:4").module)


@pytest.mark.usefixtures("factories")
def test_factory_with_each_kind_of_weights(tmp_path: Path) -> None:
    """A factory's module keeps its own weights, gets a seed, or loads a checkpoint."""
    assert built("python:operators_models:linear", "DEFAULT", inputs=VECTOR).weights == "as built"
    module = built("python:operators_models:linear", "random:1", inputs=VECTOR).module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        assert digest_weights(nn.Linear(4, 2)) == digest_weights(module)
    model = built("python:operators_models:linear", save(module, tmp_path / "l.pth"), inputs=VECTOR)
    assert digest_weights(model.module) == digest_weights(module)
    assert (model.inputs, model.preprocess, model.prefix_tokens) == (VECTOR, None, 0)
    assert built("python:operators_models:tokens", "random:1", inputs=VECTOR).prefix_tokens == 5
    wide = built("python:operators_models:linear_of", inputs=VECTOR, args={"width": 3, "bias": False}).module
    assert isinstance(wide, nn.Linear)
    assert (wide.out_features, wide.bias) == (3, None)


@pytest.mark.usefixtures("factories")
def test_constants() -> None:
    """Further arguments of a forward are those that the configuration names, in copies and fingerprints too."""
    source = "python:operators_models:scaled"
    spec = ModelSpec("m", source, device="cpu", inputs=VECTOR, constants={"by": 3})
    model = load_model(spec, replicas=2)
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for replica in model.replicas:
        assert torch.equal(cast("Tensor", replica({"x": row})), 3 * row)
    assert len(model.replicas) == 2
    other = load_model(replace(spec, constants={"by": 4}))
    assert other.identity != model.identity
    for constants, words in (({"bye": 3}, "did you mean 'by'"), ({"x": 3}, "takes no argument 'x'")):
        assert words in refusal(source, inputs=VECTOR, constants=constants)
    with pytest.raises(ValueError, match="constants are values as JSON"):
        ModelSpec("m", source, constants={"by": {1}})


@pytest.mark.usefixtures("factories")
def test_refused_rates() -> None:
    """A rate is of a model whose only input is samples."""
    source = "python:operators_models:linear"
    for inputs in ((*VECTOR, InputSpec("y", (4,))), (InputSpec("x", (4,), "int64"),), (InputSpec("x", (1, 1, 4)),)):
        assert "only input is float32 samples" in refusal(source, inputs=inputs, sound_rate=16000)
    with pytest.raises(ValueError, match="from 1 on"):
        ModelSpec("m", source, sound_rate=0)


def test_configured_preprocessing() -> None:
    """None turns images off, a spec replaces the preset, and the input's shape follows its crop."""
    source = "torchvision:squeezenet1_1"
    assert built(source, preprocess="none").preprocess is None
    wanted = PreprocessSpec(resize=140, crop=(128, 96), mean=(0, 0, 0), std=(1, 1, 1))
    model = built(source, preprocess=wanted)
    assert (model.preprocess, model.inputs[0].shape) == (wanted, (3, 128, 96))
    assert built(source, preprocess=PreprocessSpec(resize=(64, 80))).inputs[0].shape == (3, 64, 80)
    assert built(source, preprocess=PreprocessSpec(resize=64)).inputs[0].shape == (3, 224, 224)


def test_contradictory_configuration() -> None:
    """Images of another size than the configured input raise LoadError."""
    inputs = (InputSpec("x", (3, 96, 96)),)
    assert "(64, 64)" in refusal("torchvision:squeezenet1_1", inputs=inputs, preprocess=PreprocessSpec(crop=64))


REFUSED = [
    ("torchvision:resnet5", "random:0", "torchvision:resnet50"),
    ("torchvision:fasterrcnn_resnet50_fpn", "random:0", "ObjectDetection"),
    ("torchvision:quantized_resnet18", "DEFAULT", "type torchvision:resnet18"),
    ("torchvision:resnet50", "IMAGENET1K_V3", "IMAGENET1K_V2"),
    ("torchvision:resnet50", "no/such/file.pth", "'file.pth'"),
    ("torchvision:resnet50", f"random:{2**64}", "from 0 to 2**64 - 1"),
    ("torchvision:../resnet50", "random:0", "torchvision:resnet50"),
    ("torchvisoin:resnet50", "random:0", "torchvision:resnet50"),
    ("timm:vit_base_patch16_225", "random:0", "timm:vit_base_patch16_224"),
    ("timm:vit_tiny_patch16_224.augreg", "random:0", "timm:vit_tiny_patch16_224.augreg_in21k"),
    ("timm:hf-hub:timm/resnet18", "random:0", "timm:resnet18"),
    ("python:operators_models:linera", "random:0", "python:operators_models:linear"),
    ("python:operators_models:broken", "random:0", "FileNotFoundError"),
    ("python:operators_models:linear_of", "random:0", "type args: {width: …}"),
    ("python:/etc/passwd:x", "random:0", "type python:package.module:factory"),
    ("python:no_such_package.module:linear", "random:0", "'no_such_package'"),
]


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(("source", "weights", "words"), REFUSED)
def test_refusals_say_what_to_type(source: str, weights: str, words: str) -> None:
    """What is unknown, not offered or fails is refused by its reason, without paths, and with the string to type."""
    assert words in refusal(source, weights, **{"inputs": VECTOR} if source.startswith("python:") else {})


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("torchvision:resnet18", {"num_clases": 10}, "takes no argument 'num_clases' | did you mean 'num_classes'"),
        # This class ignores what it does not know.
        ("torchvision:mobilenet_v3_small", {"num_clases": 10}, "did you mean 'num_classes'"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "type weights: beside args:"),
        ("torchvision:resnet18", {"num_classes": "ten"}, "could not be built (TypeError)"),
        ("timm:resnet18", {"in_chan": 1}, "did you mean 'in_chans'"),
        ("python:operators_models:linear_of", {"widht": 3}, "takes no argument 'widht' | did you mean 'width'"),
    ],
)
def test_refused_arguments(source: str, args: dict[str, Any], words: str) -> None:
    """What a constructor does not take, or another field decides, is refused with what to type."""
    assert words in refusal(source, args=args, inputs=VECTOR)


def test_largest_seed() -> None:
    """A seed may be as large as torch's."""
    assert parse_weights(f"random:{2**64 - 1}").seed == 2**64 - 1


def test_architectures() -> None:
    """Names read from a library's files are those that it registers when it is imported; listed are classifiers."""
    names = list_architectures("torchvision", "*.py")
    presets = {name: type(get_model_weights(name).DEFAULT.transforms()).__name__ for name in list_models()}
    assert len(names) >= 80
    classifiers = {name for name, preset in presets.items() if preset == "ImageClassification"}
    assert names == {name for name in classifiers if not name.startswith("quantized_")}
    assert {"resnet50", "vit_b_16", "googlenet"} <= names
    assert not {"r3d_18", "fcn_resnet50", "ssd300_vgg16", "raft_small", "quantized_resnet18"} & names
    assert list_architectures("torchvision") == set(list_models())
    assert list_architectures("timm") >= set(timm.list_models())
    assert "vit_base_patch16_224" in list_architectures("timm")
    assert "vit_bas_patch16_224" not in list_architectures("timm")


CLASSES = 10


def digest(model: BuiltModel) -> str:
    return digest_architecture(model.architecture, model.settings, model.module)


def compute(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        value = module.eval()(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(1, *shape))
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize(
    ("source", "make"),
    [
        ("torchvision:squeezenet1_1", partial(get_model, "squeezenet1_1")),
        ("timm:resnet18", partial(timm.create_model, "resnet18")),
    ],
    ids=["torchvision", "timm"],
)
def test_fine_tuned_checkpoint(source: str, make: Callable[..., nn.Module], tmp_path: Path) -> None:
    """A checkpoint of ten classes is refused with the line to type, and is the model that was saved with that line."""
    module = make(num_classes=CLASSES)
    state, file = module.state_dict(), tmp_path / "fine.safetensors"
    save_file(state, file)
    assert "type args: {num_classes: 10}" in refusal(source, file)
    model = built(source, file, args={"num_classes": CLASSES})
    shape = model.inputs[0].shape
    assert torch.equal(compute(model.module, shape), compute(module, shape))
    save_file({name: value for name, value in state.items() if name != next(iter(state))}, file)
    assert "num_classes" not in refusal(source, file)  # heads are not all that differs


def test_transformers_configuration(tmp_path: Path) -> None:
    """Arguments override config.json: a checkpoint of another number of labels is served."""
    folder = tmp_path / "classifier"
    saved("classifier", folder)
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=7)).eval()
    save_file(dict(module.state_dict()), tmp_path / "seven.safetensors")
    source = f"transformers:{folder}"
    assert "type args: {num_labels: 7}" in refusal(source, tmp_path / "seven.safetensors")
    model = built(source, tmp_path / "seven.safetensors", args={"num_labels": 7})
    words = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(model.module(words).logits, module(words).logits)
    assert "did you mean 'num_labels'" in refusal(source, args={"num_label": 7})
    assert "dtype: beside args:" in refusal(source, args={"dtype": "float16"})
    changed = built(source, args={"hidden_act": "relu"})
    assert digest(changed) != digest(built(source))


def test_files_of_one_name(tmp_path: Path) -> None:
    """Two folders have a file of one name beside their factories: nobody's model is built by the other's."""
    for name, width in (("one", 3), ("two", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same_helper.py").write_text(f"WIDTH = {width}\n\ndef make_width():\n    return WIDTH\n")
        (folder / "net.py").write_text(
            "from torch import nn\nfrom same_helper import make_width\n\n"
            "def build():\n    return nn.Linear(4, make_width())\n"
        )
    one, two = (f"python:{tmp_path / name / 'net.py'}:build" for name in ("one", "two"))
    assert built(one, inputs=VECTOR).module.out_features == 3
    assert "'net.py' imports 'same_helper.py', and another" in refusal(two, inputs=VECTOR)
    (tmp_path / "two" / "types.py").write_text("WIDTH = 7\n")  # which nobody gets: Python's own comes first
    (tmp_path / "two" / "same_helper.py").rename(tmp_path / "two" / "another_helper.py")
    code = (tmp_path / "two" / "net.py").read_text().replace("same_", "another_")
    (tmp_path / "two" / "net.py").write_text(f"from types import SimpleNamespace\n{code}")
    assert built(two, inputs=VECTOR).module.out_features == 5
