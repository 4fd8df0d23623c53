"""Sounds: files and samples become what the library's own feature extractor and model make of each alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from layertap.models.spec import InputSpec, ModelSpec
from layertap_client import Client
from tests import sound_folders
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.media import HIDDEN, check_bulk, check_values, close, serving_files
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    configured,
    copy_module,
    image,
    npy,
    picture,
    problem,
    raw,
    tensor,
    text64,
)
from tests.sound_folders import KINDS, draw, encode, load, make_features, run

QUICK = ("wav2vec2", "wav2vec2_bert", "whisper", "clap")
CONVOLVED = "feature_extractor"
RATE = 16000
WAV, FILE = encode(draw(0.6)), "sound.wav"
SAMPLES = (InputSpec("x", (RATE,), longest=10 * RATE),)
OWN = ModelSpec(
    "own",
    "python:tests.sound_folders:Waves",
    weights="random:0",
    device="cpu",
    inputs=SAMPLES,
    sound_rate=RATE,
    constants={"sr": 8000},
)
LIMITS = {"max_sound_s": 2.0, "max_samples": 100_000}


class Folders:
    """Folders as the library saves them, and its own modules."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        self.root = root
        self.modules = {name: KINDS[name].save(root / name) for name in names}

    def compute(self, name: str, samples: Array) -> dict[sound_folders.Key, Array]:
        """What hooks on the library's model see of samples at its rate."""
        found = run(KINDS[name], self.modules[name], make_features(self.root / name, samples))
        return {key: value.numpy() for key, value in found.items()}

    def hidden(self, samples: Array, name: str = "wav2vec2") -> Array:
        """The last hidden state of samples at the model's rate."""
        return self.compute(name, samples)[".", 0, ("last_hidden_state",), "output"]

    def spec(self, name: str, **fields: Any) -> ModelSpec:
        return ModelSpec(name, f"transformers:{self.root / name}", device="cpu", **fields)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("sounds"), (*QUICK, "unscaled"))


@pytest.fixture(scope="module")
def address(folders: Folders) -> Iterator[str]:
    """The address of a server that has a sound."""
    (folders.root / FILE).write_bytes(WAV)
    with serving_files(folders.root) as address:
        yield address


@pytest.fixture(scope="module")
def live(serve: Serve, folders: Folders, address: str) -> Iterator[Live]:
    urls = {"allow_urls": address, "allow_private_urls": address}
    with serve(configured(*(folders.spec(name) for name in folders.modules), OWN), **LIMITS, **urls) as live:
        yield live


def ask(live: Live, *inputs: Json, model: str = "wav2vec2", **fields: Any) -> httpx.Response:
    body = {"model": model, "layers": [HIDDEN], "encoding": "base64", "inputs": list(inputs), **fields}
    return live.client.post("/extract", json=body)


def audio(data: bytes) -> Json:
    return {"audio": text64(data)}


def check_layers(live: Live, folders: Folders, name: str) -> None:
    """Every layer of a model, for sounds with even and odd numbers of frames."""
    described = live.client.get(f"/models/{name}").json()
    rate, channels = (described["preprocess"][field] for field in ("rate", "channels"))
    for seconds in (0.5, 0.9313):
        data = encode(draw(seconds, rate, channels), rate)
        reply = live.client.post("/extract", **raw(data, "audio/wav", model=name, layers="*,.", encoding="base64"))
        receipts = check_values(reply, folders.compute(name, load(data, rate)))
        assert all(receipt["source_rates"] == [rate] for receipt in receipts.values())


@pytest.mark.parametrize("name", QUICK)
def test_layers(live: Live, folders: Folders, name: str) -> None:
    """A folder is served without any input in the configuration, each layer with the library's own values."""
    check_layers(live, folders, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS.keys() - set(QUICK)))
def test_further_layers(serve: Serve, tmp_path: Path, name: str) -> None:
    """So are the others."""
    folders = Folders(tmp_path, (name,))
    with serve(configured(folders.spec(name))) as live:
        check_layers(live, folders, name)


def test_lengths(live: Live, folders: Folders) -> None:
    """Sounds of several lengths in one request and of other clients at once: each has the values that it has alone."""
    sounds = [draw(seconds, seed=seed) for seed, seconds in enumerate((0.4, 0.5, 0.4, 0.7, 0.55))]
    inputs = [audio(encode(each)) for each in sounds]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: arrays_of(ask(live, *inputs)), range(4)))
        alone = list(pool.map(lambda each: arrays_of(ask(live, each))[HIDDEN], inputs))
    for index, samples in enumerate(sounds):
        expected = folders.hidden(samples)
        close(alone[index], expected)
        for reply in replies:
            close(reply[f"{HIDDEN}.input{index}"], expected)
    pooled = arrays_of(ask(live, *inputs, pool="mean"))[HIDDEN]
    close(pooled, np.concatenate([folders.hidden(samples).mean(1) for samples in sounds]))


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", None), ("WAV", "FLOAT"), ("WAVEX", "PCM_24"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)],
)
def test_files(live: Live, folders: Folders, kind: str, subtype: str | None) -> None:
    """Stereo at another rate is the mean of its channels, resampled: the rate is in the receipt."""
    data = encode(draw(0.6, 44100, 2), 44100, kind, subtype)
    reply = ask(live, audio(data))
    close(arrays_of(reply)[HIDDEN], folders.hidden(load(data, RATE)))
    receipt = reply.json()["receipts"][HIDDEN]
    assert receipt["source_rates"] == [44100]
    assert receipt["seconds_per_step"] == 160 / RATE


def test_forms(live: Live, folders: Folders) -> None:
    """Bodies, parts, base64, samples with their rate as floats or whole numbers: one and the same."""
    samples = draw(0.6)
    whole = (samples * 2**15).astype(np.int16)
    query = {"model": "wav2vec2", "layers": HIDDEN, "encoding": "base64"}
    uri = {"audio": f"data:audio/wav;base64,{text64(WAV)}"}
    replies = [
        ask(live, audio(WAV)),
        ask(live, uri),
        ask(live, {**tensor(samples[:, 0]), "rate": RATE}),
        ask(live, {**tensor(whole), "rate": RATE}),
        ask(live, tensor(whole.T.astype(np.int32) * 2**16), rate=RATE),
        live.client.post("/extract", **raw(WAV, "audio/x-wav", **query)),
        live.client.post("/extract", **raw(npy(whole[:, 0]), "application/x-npy", rate=RATE, **query)),
        live.client.post("/extract", files=[("audio", WAV)], params=query),
        live.client.post("/extract", files=[("tensors", npy(samples[:, 0]))], params=query | {"rate": str(RATE)}),
    ]
    expected = folders.hidden(samples)
    for reply in replies:
        close(arrays_of(reply)[HIDDEN], expected)
    assert len({reply.json()["fingerprint"] for reply in replies}) == 1
    eight = np.round(samples[:, 0] * 100 + 128).astype(np.uint8)
    as_file = encode((eight[:, None] / 128 - 1).astype(np.float32), subtype="PCM_U8")
    reply = ask(live, {**tensor(eight), "rate": RATE})
    close(arrays_of(reply)[HIDDEN], folders.hidden(load(as_file, RATE)))


def test_features(live: Live, folders: Folders) -> None:
    """Features that the caller made are taken as tensors, under another fingerprint."""
    features = make_features(folders.root / "wav2vec2", draw(0.6))["input_values"].numpy()
    reply, of_file = ask(live, tensor(features[0])), ask(live, audio(WAV))
    close(arrays_of(reply)[HIDDEN], arrays_of(of_file)[HIDDEN])
    assert reply.json()["fingerprint"] != of_file.json()["fingerprint"]
    mixed = arrays_of(ask(live, tensor(features[0]), audio(WAV)))[HIDDEN]
    close(mixed, np.repeat(folders.hidden(draw(0.6)), 2, 0))


def test_masked_frames(live: Live, folders: Folders) -> None:
    """A frame that the feature extractor fills up, and masks, counts in no pooling."""
    samples = draw(0.93)
    expected = folders.hidden(samples, "wav2vec2_bert")
    mask = make_features(folders.root / "wav2vec2_bert", samples)["attention_mask"].bool().numpy()
    assert not mask.all()
    found = ask(live, audio(encode(samples)), model="wav2vec2_bert", pool="mean")
    close(arrays_of(found)[HIDDEN], expected[mask][None].mean(1))
    assert found.json()["receipts"][HIDDEN]["token_counts"] == [int(mask.sum())]


def test_filled_up_sounds(live: Live, folders: Folders) -> None:
    """Silence that fills a row up counts in no pooling of frames, and where frames are merged pools are refused."""
    samples = draw(0.61)
    whole, own = folders.hidden(samples, "whisper"), int(np.ceil(0.61 * RATE / 320))
    reply = ask(live, audio(encode(samples)), model="whisper", pool="mean")
    close(arrays_of(reply)[HIDDEN], whole[:, :own].mean(1))
    assert reply.json()["receipts"][HIDDEN]["token_counts"] == [own]
    close(arrays_of(ask(live, audio(encode(samples)), model="whisper"))[HIDDEN], whole)
    last = ask(live, audio(encode(samples)), model="whisper", layers=[{"layer": HIDDEN, "tokens": [-1]}])
    close(arrays_of(last)[HIDDEN], whole[:, own - 1 : own])
    body = problem(ask(live, audio(WAV), model="whisper", layers=["model.encoder.conv1"], pool="mean"), 422)
    assert "would count padding" in body["detail"]
    both = arrays_of(ask(live, audio(encode(samples)), audio(encode(draw(1.0))), model="whisper", pool="mean"))[HIDDEN]
    close(both, np.concatenate([whole[:, :own].mean(1), folders.hidden(draw(1.0), "whisper").mean(1)]))
    features = make_features(folders.root / "whisper", samples)["input_features"].numpy()
    close(arrays_of(ask(live, tensor(features[0]), model="whisper", pool="mean"))[HIDDEN], whole.mean(1))


def test_sounds_that_are_too_long(live: Live, folders: Folders) -> None:
    """Where the library leaves the end out a warning says so; where it draws a part at random it is refused."""
    samples = draw(1.2)
    reply = ask(live, audio(encode(samples)), audio(WAV), model="whisper")
    expected = [folders.hidden(each, "whisper") for each in (samples, draw(0.6))]
    close(arrays_of(reply)[HIDDEN], np.concatenate(expected))
    assert reply.json()["receipts"][HIDDEN]["truncated"] == [int(0.2 * RATE), 0]
    assert "1 of 2 sounds are longer" in reply.headers["x-layertap-warnings"]
    body = problem(ask(live, audio(encode(samples)), model="clap", layers=["."]), 422)
    assert "1 at random" in body["detail"]
    assert body["hint"] == "send 1 s or less"


BAD: dict[str, tuple[Callable[[], Json], int, str]] = {
    "no sound": (lambda: audio(b"no sound at all"), 422, "of a known format"),
    "another format": (lambda: audio(encode(draw(0.1), kind="AIFF")), 422, "of a known format"),
    "empty": (lambda: audio(b""), 422, "of a known format"),
    "no samples": (lambda: audio(encode(draw(0.0))), 422, "no samples"),
    "a cut WAV": (lambda: audio(WAV[:-100]), 422, "cut short"),
    "a cut FLAC": (lambda: audio(encode(draw(0.6), kind="FLAC")[:-3000]), 422, "can't be decoded"),
    "a cut OGG": (lambda: audio(encode(draw(1.9, 44100), 44100, "OGG")[:-2000]), 422, "cut short"),
    "a cut MP3": (lambda: audio(encode(draw(1.6), kind="MP3")[:5000]), 422, "cut short"),
    "seconds": (lambda: audio(encode(draw(2.1))), 413, "the limit is 2 s"),
    "samples": (lambda: audio(encode(draw(1.5, 48000, 2), 48000)), 413, "the limit is 100000"),
    "channels": (lambda: audio(encode(draw(0.1, channels=33))), 413, "the limit is 32"),
    "not finite": (lambda: audio(encode(draw(0.1) * np.nan, subtype="FLOAT")), 422, "NaN"),
    "too short": (lambda: audio(encode(draw(0.0005))), 422, "can't take an input of this shape"),
    "a picture": (lambda: image(picture()), 422, "of a known format"),
    "a text": (lambda: {"text": "a cat"}, 422, "takes no text"),
    "three axes": (lambda: {**tensor(np.zeros((2, 3, 4), np.float32)), "rate": 8000}, 422, "are no sound"),
    "a square": (lambda: {**tensor(np.zeros((4, 4), np.float32)), "rate": 8000}, 422, "are no sound"),
    "int64": (lambda: {**tensor(np.zeros(800, np.int64)), "rate": 8000}, 422, "are not taken as int64"),
    "a rate of a file": (lambda: {**audio(WAV), "rate": RATE}, 422, "'rate' is of samples"),
    "no rate": (lambda: {**tensor(np.zeros(800, np.float32)), "rate": 0}, 422, "greater than or equal to 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(live: Live, name: str) -> None:
    """What is no sound, too long, or not meant for this model is refused with the reason, and nothing else."""
    make, status, expected = BAD[name]
    body = problem(ask(live, make()), status)
    assert expected in str(body)
    both = ask(live, make(), audio(WAV), on_error="skip")
    if status == 422 and "rate" not in name:
        assert [len(each) for each in arrays_of(both).values()] == [1]


def test_other_models(live: Live) -> None:
    """A model of pictures refuses sounds and samples, and says what it takes."""
    body = problem(ask(live, audio(WAV), model="digits", layers=["head"]), 422)
    assert "not a picture" in body["detail"]
    body = problem(ask(live, {**tensor(draw(0.1)), "rate": RATE}, model="digits", layers=["head"]), 422)
    assert "takes no sounds" in body["detail"]


@pytest.mark.slow
def test_worker_processes(serve: Serve, folders: Folders) -> None:
    """Worker processes decode as threads do, samples too; what they refuse leaves them as they were."""
    with serve(configured(folders.spec("wav2vec2")), workers=1) as live:
        for each in (audio(WAV), {**tensor(draw(0.6)), "rate": RATE}):
            close(arrays_of(ask(live, each))[HIDDEN], folders.hidden(draw(0.6)))
        problem(ask(live, audio(WAV[:-100])), 422)
        close(arrays_of(ask(live, audio(WAV), audio(WAV)))[HIDDEN], np.repeat(folders.hidden(draw(0.6)), 2, 0))


def test_fingerprints(live: Live) -> None:
    """Sounds of all lengths and rates share one fingerprint; another setting of the feature extractor makes another."""
    sounds = [WAV, encode(draw(0.4)), encode(draw(0.5, 8000), 8000)]
    found = {
        model: {ask(live, audio(each), model=model).json()["fingerprint"] for each in sounds}
        for model in ("wav2vec2", "unscaled")
    }
    assert [len(each) for each in found.values()] == [1, 1]
    assert not found["wav2vec2"] & found["unscaled"]


def test_own_models(live: Live) -> None:
    """A model of one's own that takes samples takes files at its rate, with constants of its forward."""
    module = copy_module(live, "own")
    sounds = [encode(draw(0.5, 44100, 2), 44100), WAV]
    found = arrays_of(ask(live, *map(audio, sounds), model="own", layers=["."]))
    for index, data in enumerate(sounds):
        samples = torch.from_numpy(load(data, RATE)).mean(1)[None]
        with torch.no_grad():
            close(found[f"..input{index}"], (module.conv(samples[:, None]) / 2).numpy())


def test_urls(live: Live, folders: Folders, address: str) -> None:
    """A sound at a URL is fetched where pictures are."""
    reply = ask(live, {"url": f"http://{address}/{FILE}"})
    close(arrays_of(reply)[HIDDEN], folders.hidden(draw(0.6)))


def test_probes(live: Live) -> None:
    """The fixed input of a model of sounds is a sound."""
    reply = live.client.get("/models/wav2vec2/probe", params={"layers": HIDDEN})
    assert reply.json()["receipts"][HIDDEN]["probe"]["input"] == "sound"


@pytest.mark.parametrize("what", ["missing", "unknown", "dithered"])
def test_folders_that_are_refused(serve: Serve, tmp_path: Path, what: str) -> None:
    """A folder whose feature extractor is missing, unknown or random is refused by name."""
    KINDS["whisper"].save(tmp_path)
    config = tmp_path / "preprocessor_config.json"
    text = config.read_text("utf-8")
    if what == "missing":
        config.unlink()
    elif what == "unknown":
        config.write_text(text.replace("WhisperFeatureExtractor", "UnivNetFeatureExtractor"), "utf-8")
    else:
        config.write_text(text.replace('"dither": 0.0', '"dither": 0.1'), "utf-8")
    spec = ModelSpec("m", f"transformers:{tmp_path}", device="cpu", required=False)
    with serve(configured(spec)) as live:
        body = problem(live.client.post("/extract", **raw(WAV, "audio/wav", model="m")), 503)
    assert "preprocessor_config.json" in body["detail"]


def test_client(live: Live, folders: Folders, tmp_path: Path) -> None:
    """The client takes paths, bytes, entries, and samples with their rate."""
    file, samples = tmp_path / "a.wav", draw(0.6)
    file.write_bytes(WAV)
    expected = folders.hidden(samples)
    with Client(live.url, model="wav2vec2") as client:
        for given in (file, str(file), WAV, [file], {"audio": str(file)}, {"tensor": samples, "rate": RATE}):
            close(client.extract(given, [HIDDEN])[HIDDEN], expected)
        close(client.extract(samples, [HIDDEN], rate=RATE)[HIDDEN], expected)
        both = client.extract([samples, file], [HIDDEN], rate=RATE)[HIDDEN]
        close(both, np.repeat(expected, 2, 0))


@pytest.mark.parametrize("is_remote", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bulk(command: Command, live: Live, folders: Folders, tmp_path: Path, *, is_remote: bool) -> None:
    """A folder of sounds becomes a row for each; what is no sound has its reason."""
    sounds = {f"{seconds}.{kind}": (draw(seconds), kind) for seconds, kind in ((0.4, "wav"), (0.5, "flac"))}
    files = {
        name: (encode(samples, kind=kind.upper()), folders.hidden(samples)) for name, (samples, kind) in sounds.items()
    }
    check_bulk(command, tmp_path, folders.root / "wav2vec2", files, "bad.ogg", live if is_remote else None)


def test_packages_that_are_missing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra a sound is refused with what to install, and samples at the model's rate are still taken."""
    for package in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, package, None)
    body = problem(ask(live, audio(WAV)), 422)
    assert "layertap[sound]" in body["hint"]
    problem(ask(live, {**tensor(draw(0.2)), "rate": 8000}), 422)
    assert ask(live, {**tensor(draw(0.2)), "rate": RATE}).status_code == 200
