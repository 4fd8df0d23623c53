"""Folders of tiny seeded models of videos with their processors, as transformers saves them, and videos."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import transformers
from numpy.typing import NDArray
from torch import Tensor

from tests.oracle import Key, record, seeded

Frames = NDArray[np.uint8]
FRAMES = 4  # that each of the models takes
BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
XCLIP_VISION = {**BODY, "image_size": 32, "patch_size": 16, "num_frames": FRAMES, "mit_hidden_size": 16} | {
    f"mit_{name}": value for name, value in (("num_hidden_layers", 1), ("num_attention_heads", 2))
}
XCLIP = {
    "vision_config": XCLIP_VISION | {"mit_intermediate_size": 24},
    "text_config": {**BODY, "vocab_size": 20, "max_position_embeddings": 12},
    "projection_dim": 16,
    "prompt_num_attention_heads": 2,
    "prompt_layers": 1,
}


@dataclass(frozen=True)
class Kind:
    """A model's class with its configuration, and its processor."""

    model: str
    config: str
    options: dict[str, Any]
    processor: str
    settings: dict[str, Any]

    def save(self, folder: Path) -> Any:
        """Save a module and its processor in a folder; the module as the library loads it."""
        whole = getattr(transformers, self.model)
        seeded(whole(getattr(transformers, self.config)(**self.options)), 0).save_pretrained(folder)
        getattr(transformers, self.processor)(**self.settings).save_pretrained(folder)
        return whole.from_pretrained(folder).eval().requires_grad_(False)


SQUARE = BODY | {"image_size": 32, "patch_size": 16, "num_frames": FRAMES}
VIDEOMAE = SQUARE | {"tubelet_size": 2}
KINDS = {
    "videomae": Kind("VideoMAEModel", "VideoMAEConfig", VIDEOMAE, "VideoMAEVideoProcessor", SIZES),
    "videomae_images": Kind("VideoMAEModel", "VideoMAEConfig", VIDEOMAE, "VideoMAEImageProcessor", SIZES),
    "classifier": Kind("VideoMAEForVideoClassification", "VideoMAEConfig", VIDEOMAE, "VideoMAEImageProcessor", SIZES),
    "vivit": Kind("VivitModel", "VivitConfig", SQUARE | {"tubelet_size": [2, 16, 16]}, "VivitImageProcessor", SIZES),
    "vivit_video": Kind(
        "VivitModel", "VivitConfig", SQUARE | {"tubelet_size": [2, 16, 16]}, "VivitVideoProcessor", SIZES
    ),
    "timesformer": Kind("TimesformerModel", "TimesformerConfig", SQUARE, "VideoMAEImageProcessor", SIZES),
    "vjepa2": Kind(
        "VJEPA2Model",
        "VJEPA2Config",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "crop_size": 32}
        | {"patch_size": 16, "frames_per_clip": FRAMES, "tubelet_size": 2}
        | {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "pred_mlp_ratio": 2},
        "VJEPA2VideoProcessor",
        {"crop_size": 32},
    ),
    "xclip": Kind("XCLIPModel", "XCLIPConfig", XCLIP, "VideoMAEImageProcessor", SIZES),
}


def draw(frames: int, seed: int = 0, size: tuple[int, int] = (64, 48)) -> Frames:
    """Slopes that move, and noise; uint8 (frames, height, width, 3)."""
    generator = np.random.default_rng(seed)
    down, across = np.mgrid[0 : size[1], 0 : size[0]]
    drawn = [
        np.stack([across * 3 + 7 * each, down * 5 + 3 * each, across + down + 11 * each], -1) + 20 * seed
        for each in range(frames)
    ]
    noise = generator.integers(0, 40, (frames, size[1], size[0], 3))
    return ((np.stack(drawn) + noise) % 256).astype(np.uint8)


CODECS = {"mp4": ("mpeg4", "yuv420p"), "webm": ("libvpx", "yuv420p"), "gif": ("gif", "rgb8")}


def encode(frames: Frames, kind: str = "mp4", rate: int = 10, codec: str = "", **options: str) -> bytes:
    """A file of a video."""
    stream = BytesIO()
    with av.open(stream, "w", format=kind, options=options) as file:
        track = file.add_stream(codec or CODECS[kind][0], rate=rate)
        track.height, track.width = frames.shape[1:3]
        track.pix_fmt = CODECS[kind][1]
        for each in frames:
            file.mux(track.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(each), format="rgb24")))
        file.mux(track.encode())
    return stream.getvalue()


def load(data: bytes) -> Frames:
    """All frames of a file, as people load them."""
    with av.open(BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def choose(length: int, count: int = FRAMES) -> list[int]:
    """The numbers of the frames that the documentation names."""
    return [int(each) for each in np.clip(np.linspace(0, length, num=count), 0, length - 1).astype(np.int64)]


def make_features(folder: Path, frames: Frames) -> dict[str, Tensor]:
    """A whole clip by a folder's own processor."""
    of_videos = (folder / "video_preprocessor_config.json").is_file()
    auto = transformers.AutoVideoProcessor if of_videos else transformers.AutoImageProcessor
    return dict(auto.from_pretrained(folder)(list(frames), return_tensors="pt"))


def run(module: Any, features: dict[str, Tensor]) -> dict[Key, Tensor]:
    """What plain hooks on the library's model see of a video; of two towers, that of videos alone."""
    if hasattr(module, "get_video_features"):
        vars(module)["forward"] = lambda **rows: module.get_video_features(**rows)
    try:
        return record(module, **features)
    finally:
        vars(module).pop("forward", None)
