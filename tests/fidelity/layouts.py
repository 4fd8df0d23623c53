"""Layouts of whole libraries' classes, surveyed with random weights at two oblong sizes of picture.

``python -m tests.fidelity.layouts [LIBRARY[:NAME] …]`` prints for each class how many tensors of three axes and more
it has, of how many the channels are unknown, and how many change their layout with the size of the picture.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import torchvision
import transformers
from timm.models._registry import _model_to_module
from torch import nn

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.spec import InputSpec
from tests.transformers_nets import CLIP_PICTURE, NETS, PICTURE, VOCABULARY

SIZES = ((128, 192), (192, 256))
SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "xxtiny",
    "xxs",
    "tiny",
    "mini",
    "_xs",
    "small",
    "_t",
    "_s",
    "18",
    "b0",
    "050",
)
MAX_PARAMETERS = 6e7
A_CLASS = 1  # models of each of timm's files
PICTURES = ("vit", "deit", "registers", "backbone", "clip_picture")
Layouts = dict[str, str | None]
Build = Callable[[tuple[int, int]], nn.Module]


def survey_at(module: nn.Module, *inputs: InputSpec) -> Catalog:
    """The catalog of a module, with its functions."""

    def run(rows: dict[str, torch.Tensor]) -> object:
        return module(**rows) if len(rows) > 1 or hasattr(module, "config") else module(*rows.values())

    device = torch.device("cpu")
    return survey(module.eval(), inputs, run, device, 0, torch.float32, functions=True)


def list_layouts(catalog: Catalog) -> Layouts:
    """The layouts of tensors with an axis for rows and two others or more, but for attention, by where they are."""
    found: Layouts = {}
    for layer in catalog.layers.values():
        for number, call in enumerate(layer.calls):
            for name, each in (("", call), *((f"/{name}", each) for name, each in call.functions.items())):
                for site in ("input", "output"):
                    for info in getattr(each, site).tensors:
                        if len(info.shape) > 2 and info.row_axis is not None and info.is_floating:
                            found[f"{layer.name}#{number}{name}{info.path}:{site} {len(info.shape)}"] = info.layout
    return found


def list_timm() -> Iterator[tuple[str, Build]]:
    """Small models of each of timm's files."""
    by_file: dict[str, list[str]] = {}
    for name in timm.list_models():
        by_file.setdefault(_model_to_module[name], []).append(name)
    for names in by_file.values():
        order = sorted(names, key=lambda name: next((i for i, word in enumerate(SMALL) if word in name), 99))
        for name in order[:A_CLASS]:
            yield f"timm:{name}", lambda size, name=name: make_timm(name, size)  # type: ignore[misc]


def make_timm(name: str, size: tuple[int, int]) -> nn.Module:
    """A model of timm for pictures of a size."""
    try:
        module: nn.Module = timm.create_model(name, img_size=size)
    except TypeError:
        module = timm.create_model(name)
    return module


def list_torchvision() -> Iterator[tuple[str, Build]]:
    """The smallest model of each of torchvision's families for classification and segmentation."""
    chosen: dict[str, tuple[int, str]] = {}
    for name in (
        *torchvision.models.list_models(torchvision.models),
        *torchvision.models.list_models(torchvision.models.segmentation),
    ):
        weights = torchvision.models.get_model_weights(name)
        count = min((each.meta["num_params"] for each in weights), default=0)
        family = name.rstrip("0123456789_bdhltsx").split("_")[0]
        if family not in chosen or count < chosen[family][0]:
            chosen[family] = count, name
    for _, name in chosen.values():
        yield (
            f"torchvision:{name}",
            lambda size, name=name: torchvision.models.get_model(  # type: ignore[misc]
                name,
                weights=None,
                **({"weights_backbone": None} if name.startswith(("fcn", "deeplab", "lraspp")) else {}),
            ),
        )


def list_transformers() -> Iterator[tuple[str, Build]]:
    """Small nets of the tests, and small pictures' models of further classes."""
    for name in NETS:
        if name not in ("clip", "siglip", "siglip2", "chinese_clip"):
            yield f"transformers:{name}", lambda size, name=name: NETS[name]()  # type: ignore[misc]
    for name in VISION:
        yield f"transformers:{name}", lambda size, name=name: make_vision(name, size)  # type: ignore[misc]


VISION: dict[str, dict[str, Any]] = {
    "ViTModel": PICTURE,
    "ViTMAEModel": {**PICTURE, "mask_ratio": 0.5},
    "CLIPVisionModel": CLIP_PICTURE,
    "SiglipVisionModel": PICTURE,
    "BeitModel": PICTURE,
    "Dinov2Model": PICTURE,
    "Dinov2Backbone": {**PICTURE, "out_features": ["stage1", "stage2"]},
    "DINOv3ViTModel": PICTURE,
    "IJepaModel": PICTURE,
    "PvtV2Model": {},
    "SegformerForSemanticSegmentation": {},
    "SwinModel": {"embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4},
    "Swinv2Model": {"embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4},
    "ConvNextModel": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
    "ConvNextV2Model": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
    "PoolFormerModel": {},
    "MobileViTModel": {},
    "MobileViTV2Model": {},
    "EfficientNetModel": {},
    "ResNetModel": {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    "RegNetModel": {},
    "LevitModel": {},
    "CvtModel": {},
    "GLPNForDepthEstimation": {},
    "DPTForDepthEstimation": {**PICTURE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
                              "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16},
    "DepthAnythingForDepthEstimation": {"neck_hidden_sizes": [8, 16], "reassemble_factors": [2, 1],
                                        "fusion_hidden_size": 16, "head_hidden_size": 8, "reassemble_hidden_size": 32},
    "HieraModel": {},
    "FocalNetModel": {},
    "BitModel": {"hidden_sizes": [32, 64], "depths": [1, 1], "embedding_size": 16},
    "ConditionalDetrModel": {"use_timm_backbone": False},
    "DetrForObjectDetection": {"encoder_layers": 1, "decoder_layers": 1, "d_model": 64},
    "RTDetrForObjectDetection": {},
    "YolosModel": {**PICTURE, "num_detection_tokens": 5},
    "VitDetModel": PICTURE,
    "DacModel": {},
}  # fmt: skip


def make_vision(name: str, size: tuple[int, int]) -> nn.Module:
    """A small model of a class of transformers for pictures of a size, where its configuration has one."""
    kind = getattr(transformers, name)
    config = kind.config_class(**VISION[name])
    if hasattr(config, "image_size"):
        config.image_size = size if name not in ("BeitModel", "IJepaModel") else max(size)
    if name == "DepthAnythingForDepthEstimation":
        options = {**PICTURE, "out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
        config.backbone_config = transformers.Dinov2Config(**options)
    module: nn.Module = kind(config)
    return module


def describe_inputs(name: str, size: tuple[int, int]) -> tuple[InputSpec, ...]:
    """What a model takes: pictures of a size, sound, or texts."""
    net = name.partition(":")[2]
    if net == "wave":
        return (InputSpec("input_values", (400 + size[0],)),)
    if net in NETS and net not in PICTURES:
        return (InputSpec("input_ids", (size[0] // 16,), "int64", values=(4, VOCABULARY)),)
    size = (32, 32) if net in NETS or net == "vit_b_16" else size
    return (InputSpec("pixel_values", (3, *size)),)


def main() -> None:
    """Print a row for each class; names of arguments choose."""
    warnings.simplefilter("ignore")
    chosen = tuple(sys.argv[1:])
    totals = [0, 0, 0]
    sys.stdout.write("| class | tensors | channels unknown | changed |\n| --- | --- | --- | --- |\n")
    for listed in (list_timm, list_torchvision, list_transformers):
        for name, build in listed():
            if chosen and not name.startswith(chosen):
                continue
            found = []
            try:
                for size in SIZES:
                    torch.manual_seed(0)
                    module = build(size)
                    if sum(each.numel() for each in module.parameters()) > MAX_PARAMETERS:
                        raise ValueError("large")
                    found.append(list_layouts(survey_at(module, *describe_inputs(name, size))))
                    del module
            except Exception as error:  # whatever a class raises, it has no row
                sys.stdout.write(f"| {name} | {type(error).__name__}: {str(error)[:100]!r} | | |\n")
                continue
            first, second = found
            unknown = [key for key, layout in first.items() if "C" not in (layout or "")]
            changed = [key for key in first if key in second and first[key] != second[key]]
            counts = (len(first), len(unknown), len(changed))
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
            sys.stdout.write(f"| {name} | {' | '.join(map(str, counts))} |\n")
            sys.stdout.flush()
            gc.collect()
    sys.stdout.write(f"| all | {' | '.join(map(str, totals))} |\n")


if __name__ == "__main__":
    main()
