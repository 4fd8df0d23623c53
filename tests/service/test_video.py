"""Videos: the frames that are taken of files and arrays become what the library's own processor and model make."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights

from layertap.models.errors import InputError
from layertap.models.inputs.video import VideoProcessor
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from layertap.service.inputs.videos import decode_video
from layertap.service.settings import Settings
from layertap_client import Client
from tests.marks import slow_but
from tests.oracle import Key
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.media import HIDDEN, check_bulk, check_values, close, serving_files
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, tensor, text64
from tests.service.support import encode as encode_picture
from tests.video_folders import KINDS, Frames, choose, draw, encode, load, make_features, run

SERVED = ("videomae", "xclip")
ALL_LAYERS = {"layers": "*,.", "encoding": "base64"}
MP4, FILE = encode(draw(21)), "clip.mp4"
LIMITS: dict[str, Any] = {"max_video_s": 5.0, "max_video_frames": 40, "max_pixels": 100_000}


class Folders:
    """Folders as the library saves them, and its own modules."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        self.root = root
        self.modules = {name: KINDS[name].save(root / name) for name in names}

    def compute(self, name: str, frames: Frames) -> dict[Key, Array]:
        """What hooks on the library's model see of the frames that are taken of all ``frames`` of a video."""
        features = make_features(self.root / name, frames[choose(len(frames))])
        return {key: value.numpy() for key, value in run(self.modules[name], features).items()}

    def hidden(self, frames: Frames) -> Array:
        return self.compute("videomae", frames)[".", 0, ("last_hidden_state",), "output"]

    def spec(self, name: str) -> ModelSpec:
        load: Any = "lazy" if name == "xclip" else "startup"
        return ModelSpec(name, f"transformers:{self.root / name}", device="cpu", load=load)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("videos"), SERVED)


@pytest.fixture(scope="module")
def address(folders: Folders) -> Iterator[str]:
    """The address of a server that has a video."""
    (folders.root / FILE).write_bytes(MP4)
    with serving_files(folders.root) as address:
        yield address


@pytest.fixture(scope="module")
def live(serve: Serve, folders: Folders, address: str) -> Iterator[Live]:
    urls = {"allow_urls": address, "allow_private_urls": address}
    with serve(configured(*map(folders.spec, SERVED)), workers=1, deadline_s=120, **LIMITS, **urls) as live:
        yield live


def ask(live: Live, *inputs: Json, model: str = "videomae", **fields: Any) -> httpx.Response:
    body = {"model": model, "layers": [HIDDEN], "encoding": "base64", "inputs": list(inputs), **fields}
    return live.client.post("/extract", json=body)


def video(data: bytes) -> Json:
    return {"video": text64(data)}


def check_layers(live: Live, folders: Folders, name: str, sent: Json, frames: Frames) -> Json:
    """Layers of a model, and which frames were taken; the receipts."""
    reply = live.client.post("/extract", **sent)
    receipts = check_values(reply, folders.compute(name, frames))
    assert all(receipt["source_frames"] == [choose(len(frames))] for receipt in receipts.values())
    return receipts


@pytest.mark.parametrize("name", slow_but(["videomae"], SERVED))
def test_layers(live: Live, folders: Folders, name: str) -> None:
    """A folder is served without any input in the configuration, each layer with the library's own values."""
    for length in (21, 33):
        data = encode(draw(length, seed=length))
        receipts = check_layers(live, folders, name, raw(data, "video/mp4", model=name, **ALL_LAYERS), load(data))
        for receipt in receipts.values():
            np.testing.assert_allclose(receipt["source_seconds"], [[n / 10 for n in choose(length)]])


@pytest.mark.parametrize("name", slow_but(["vjepa2"], sorted(KINDS.keys() - set(SERVED))))
def test_further_layers(serve: Serve, tmp_path: Path, name: str) -> None:
    """So are the others, here with frames: how files become frames depends on no model."""
    folders, frames = Folders(tmp_path, (name,)), draw(21)
    with serve(configured(folders.spec(name))) as live:
        check_layers(live, folders, name, raw(npy(frames), "application/x-npy", model=name, **ALL_LAYERS), frames)


@pytest.mark.parametrize("name", slow_but(["s3d"], ["s3d", "r3d_18", "mvit_v2_s", "swin3d_t"]))
def test_presets(name: str) -> None:
    """Torchvision's models take 16 frames, whose rows are those of their presets for a whole clip."""
    built = build_model(ModelSpec("m", f"torchvision:{name}", weights="random:0", device="cpu"))
    how, frames = built.preprocess, draw(21)
    assert isinstance(how, VideoProcessor)
    assert how.choose_frames(21) == choose(21, 16)
    clip = frames[choose(21, 16)]
    row = how.join_frames([how.make_frame(Image.fromarray(each)) for each in clip])
    expected = get_model_weights(name).DEFAULT.transforms()(torch.from_numpy(clip).permute(0, 3, 1, 2))
    assert row.shape == expected.shape == built.inputs[0].shape
    torch.testing.assert_close(row, expected)


def test_lengths(live: Live, folders: Folders) -> None:
    """Videos of several lengths, of several clients at once: each has the values that it has alone."""
    videos = [encode(draw(length, seed=length)) for length in (4, 21, 5, 30)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: ask(live, *map(video, videos)), range(4)))
    expected = np.concatenate([folders.hidden(load(each)) for each in videos])
    for reply in replies:
        close(arrays_of(reply)[HIDDEN], expected)
        assert reply.json()["receipts"][HIDDEN]["source_frames"] == [choose(length) for length in (4, 21, 5, 30)]


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("gif", "gif")]
)
def test_files(live: Live, folders: Folders, kind: str, codec: str) -> None:
    """Each kind of file gives the frames that PyAV decodes, those that depend on later ones too."""
    data = encode(draw(21), kind, codec=codec)
    close(arrays_of(ask(live, video(data)))[HIDDEN], folders.hidden(load(data)))


@pytest.mark.parametrize("rest", [b"\n", b"\0\0", b"more of a file"])
def test_gif_and_more(live: Live, folders: Folders, rest: bytes) -> None:
    """What comes behind the end of a GIF is ignored, as by PyAV and Pillow."""
    data = encode(draw(21), "gif", codec="gif")
    close(arrays_of(ask(live, video(data + rest)))[HIDDEN], folders.hidden(load(data)))


def test_turned(live: Live, folders: Folders) -> None:
    """A video that was recorded with the camera on its side is turned upright."""
    place = MP4.index(b"tkhd") + 4 + 40  # the matrix: a quarter turn clockwise, as cameras write it
    turn = b"".join(each.to_bytes(4, "big", signed=True) for each in (0, 1 << 16, 0, -(1 << 16), 0, 0))
    turned = MP4[:place] + turn + MP4[place + len(turn) :]
    frames = np.rot90(load(MP4), -1, (1, 2))
    close(arrays_of(ask(live, video(turned)))[HIDDEN], folders.hidden(frames))


def test_forms(live: Live, folders: Folders) -> None:
    """Bodies, parts, base64, URLs, arrays of frames and lists of pictures: one and the same."""
    frames = load(MP4)
    query = {"model": "videomae", "layers": HIDDEN, "encoding": "base64"}
    replies = [
        ask(live, video(MP4)),
        ask(live, {"video": f"data:video/mp4;base64,{text64(MP4)}"}),
        ask(live, tensor(frames)),
        ask(live, {"images": [text64(encode_picture(each)) for each in frames]}),
        live.client.post("/extract", **raw(MP4, "video/mp4", **query)),
        live.client.post("/extract", **raw(npy(frames), "application/x-npy", **query)),
        live.client.post("/extract", files=[("video", MP4)], params=query),
        live.client.post("/extract", files=[("tensors", npy(frames))], params=query),
    ]
    expected = folders.hidden(frames)
    for reply in replies:
        close(arrays_of(reply)[HIDDEN], expected)
        assert reply.json()["receipts"][HIDDEN]["source_frames"] == [choose(21)]
    assert len({reply.json()["fingerprint"] for reply in replies}) == 1
    both = live.client.post("/extract", **raw(npy(np.stack([frames, frames[::-1]])), "application/x-npy", **query))
    close(arrays_of(both)[HIDDEN], np.concatenate([expected, folders.hidden(frames[::-1])]))


def test_urls(live: Live, folders: Folders, address: str) -> None:
    """A video at a URL is fetched where pictures are."""
    close(arrays_of(ask(live, {"url": f"http://{address}/{FILE}"}))[HIDDEN], folders.hidden(load(MP4)))


def test_features(live: Live, folders: Folders) -> None:
    """Rows that the caller made are taken as tensors, under another fingerprint."""
    frames = load(MP4)
    features = make_features(folders.root / "videomae", frames[choose(21)])["pixel_values"].numpy()
    reply, of_file = ask(live, tensor(features[0])), ask(live, video(MP4))
    close(arrays_of(reply)[HIDDEN], arrays_of(of_file)[HIDDEN])
    assert reply.json()["fingerprint"] != of_file.json()["fingerprint"]
    mixed = arrays_of(ask(live, tensor(features[0]), video(MP4)))[HIDDEN]
    close(mixed, np.repeat(folders.hidden(frames), 2, 0))


@pytest.mark.slow
def test_texts_and_videos(live: Live, folders: Folders) -> None:
    """The two towers of X-CLIP put texts and videos into one space."""
    tokens = [0, 5, 7, 1]
    one, other = (
        live.client.post("/extract", json={"model": "xclip", "encoding": "base64", "inputs": [each]})
        for each in ({"tokens": tokens}, video(MP4))
    )
    probed = live.client.get("/models/xclip/probe").json()["receipts"]
    ((key, receipt),) = one.json()["receipts"].items()
    with torch.no_grad():
        expected = folders.modules["xclip"].get_text_features(torch.tensor([tokens])).pooler_output.numpy()
    close(arrays_of(one)[key], expected)
    assert receipt["space"] == other.json()["receipts"][key]["space"]
    assert probed[key]["probe"]["input"] == "video"


def audio_only() -> bytes:
    stream = BytesIO()
    with av.open(stream, "w", format="mp4") as file:
        track = file.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        file.mux(track.encode(frame))
        file.mux(track.encode())
    return stream.getvalue()


def patch(data: bytes, tag: bytes, offset: int, *numbers: int) -> bytes:
    """A file with other numbers, of four bytes each, behind a tag."""
    place, written = data.index(tag) + len(tag) + offset, b"".join(each.to_bytes(4, "big") for each in numbers)
    return data[:place] + written + data[place + len(written) :]


FRAGMENTS = encode(draw(21), movflags="frag_keyframe+empty_moov")
BAD: dict[str, tuple[Callable[[], Json], int, str]] = {
    "no video": (lambda: video(b"no video at all"), 422, "of a known format"),
    "a playlist": (lambda: video(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"), 422, "of a known format"),
    "a list of files": (lambda: video(b"ffconcat version 1.0\nfile /etc/passwd\n"), 422, "of a known format"),
    "a picture": (lambda: {"image": text64(encode_picture(draw(1)[0]))}, 422, "of a known format"),
    "a sound": (lambda: video(audio_only()), 422, "no video"),
    "only a head": (lambda: video(b"\0\0\0\x18ftypisom\0\0\0\0isomiso2"), 422, "can't be decoded"),
    "a cut MP4": (lambda: video(MP4[:-300]), 422, "cut short"),
    "cut fragments": (lambda: video(FRAGMENTS[:-800]), 422, "cut short"),
    "a cut WebM": (lambda: video(encode(draw(21), "webm")[:-300]), 422, "cut short"),
    "a cut GIF": (lambda: video(encode(draw(21), "gif")[:-300]), 422, "cut short"),
    "a GIF cut behind a semicolon": (lambda: video(encode(draw(21), "gif")[:-300] + b";"), 422, "cut short"),
    "a GIF without its end": (lambda: video(encode(draw(21), "gif")[:-1]), 422, "cut short"),
    "a claim of many frames": (lambda: video(patch(MP4, b"stsz", 4, 1, 10**8)), 422, "0 frames"),
    "a claim of more fragments": (lambda: video(patch(FRAGMENTS, b"trun", 4, 4 * 10**8)), 422, "can't be decoded"),
    "few frames": (lambda: video(encode(draw(3))), 422, "3 frames, and the model takes 4"),
    "few pictures": (lambda: {"images": [text64(encode_picture(draw(1)[0]))]}, 422, "1 frames, and the model takes 4"),
    "no frames": (lambda: tensor(np.zeros((0, 8, 8, 3), np.uint8)), 422, "are no video"),
    "channels first": (lambda: tensor(np.zeros((4, 3, 8, 8), np.uint8)), 422, "are no video"),
    "a text": (lambda: {"text": "a cat"}, 422, "takes no text"),
    "samples": (lambda: {**tensor(np.zeros(800, np.float32)), "rate": 8000}, 422, "takes no sounds"),
    "seconds": (lambda: video(encode(draw(21), rate=2)), 413, "10.5 s, the limit is 5"),
    "frames": (lambda: video(encode(draw(45))), 413, "41 frames, the limit is 40"),
    "frames of an array": (lambda: tensor(np.zeros((41, 8, 8, 3), np.uint8)), 413, "41 frames, the limit is 40"),
    "frames of a list": (
        lambda: {"images": [text64(encode_picture(draw(1)[0]))] * 41},
        413,
        "41 frames, the limit is 40",
    ),
    "pixels": (lambda: video(encode(draw(4, size=(400, 300)))), 413, "120000 pixels"),
    "pixels that a head hides": (
        lambda: video(patch(encode(draw(4, size=(400, 300))), b"mp4v", 24, 0x00400030)),
        413,
        "120000 pixels",
    ),
    "pixels of an array": (lambda: tensor(np.zeros((4, 400, 300, 3), np.uint8)), 413, "120000 pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(live: Live, name: str) -> None:
    """What is no video, too large, or made to harm is refused with the reason, and nothing else."""
    make, status, expected = BAD[name]
    assert expected in str(problem(ask(live, make()), status))
    if status == 422:
        assert [len(each) for each in arrays_of(ask(live, make(), video(MP4), on_error="skip")).values()] == [1]


@pytest.mark.slow
def test_millions_of_frames(live: Live) -> None:
    """A file that claims to have millions of frames is refused by their number, or loses its decoder; not the next."""
    bomb = patch(patch(MP4, b"stsz", 4, 1, 5 * 10**7), b"stsc", 12, 5 * 10**7)
    reply = ask(live, video(bomb))
    assert (reply.status_code, reply.status_code == 413 or "takes longer than 5 s" in reply.text) in {
        (413, True),
        (422, True),
    }
    assert ask(live, video(MP4)).status_code == 200


def test_other_models(live: Live) -> None:
    """A model of pictures takes the first frame of a GIF, and no video."""
    gif = encode(draw(5), "gif")
    reply = ask(live, {"image": text64(gif)}, model="digits", layers=["head"])
    first = ask(live, {"image": text64(encode_picture(np.asarray(Image.open(BytesIO(gif)).convert("RGB"))))})
    assert reply.status_code == 200
    assert first.status_code == 422
    assert "not a picture" in problem(ask(live, video(MP4), model="digits", layers=["head"]), 422)["detail"]
    frames = {"images": [text64(gif)]}
    assert "takes no videos" in problem(ask(live, frames, model="digits", layers=["head"]), 422)["detail"]
    problem(live.client.post("/explain", json={"model": "videomae", "inputs": [video(MP4)]}), 422)


def test_without_workers(serve: Serve, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without worker processes files are refused, and frames are taken; without PyAV it is said what to install."""
    with serve(configured(folders.spec("videomae")), workers=0) as live:
        problem(ask(live, video(MP4)), 415)
        frames = load(MP4)
        close(arrays_of(ask(live, tensor(frames)))[HIDDEN], folders.hidden(frames))
        pictures = {"images": [text64(encode_picture(each)) for each in frames]}
        close(arrays_of(ask(live, pictures))[HIDDEN], folders.hidden(frames))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError) as refused:
        decode_video(MP4, choose, torch.tensor, Settings())
    assert "layertap[video]" in refused.value.hint


def test_probes(live: Live) -> None:
    """The fixed input of a model of videos is a video."""
    reply = live.client.get("/models/videomae/probe", params={"layers": HIDDEN})
    assert reply.json()["receipts"][HIDDEN]["probe"]["input"] == "video"


def test_client(live: Live, folders: Folders, tmp_path: Path) -> None:
    """The client takes paths, bytes, entries and arrays."""
    file, frames = tmp_path / "a.mp4", load(MP4)
    file.write_bytes(MP4)
    with Client(live.url, model="videomae") as client:
        for given in (file, MP4, {"video": file}, {"tensor": frames}):
            close(client.extract(given, [HIDDEN])[HIDDEN], folders.hidden(frames))


@pytest.mark.parametrize("is_remote", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bulk(command: Command, live: Live, folders: Folders, tmp_path: Path, *, is_remote: bool) -> None:
    """A folder of videos becomes a row for each; what is no video has its reason."""
    videos = {f"{kind}.{kind}": encode(draw(9, seed=seed), kind) for seed, kind in enumerate(("gif", "mp4", "webm"))}
    files = {name: (data, folders.hidden(load(data))) for name, data in videos.items()}
    check_bulk(command, tmp_path, folders.root / "videomae", files, "zero.mp4", live if is_remote else None)
