"""Probes: the results for a fixed input, alone in its forward, computed once for each result.

The fixed inputs never change and are the same on every machine: they depend only on the numbers here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from math import prod, sqrt

import numpy as np
from PIL import Image

from layertap.models.errors import RequestError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.noise import find_example
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.requested import Embedding, Selector
from layertap.models.spec import InputSpec
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.execute.item_rows import predict_rows
from layertap.service.engine.prepare.planner import find_tower
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.features import Array, Features
from layertap.service.inputs.items import ArraysItem, EncodedItem, LocalItem, SamplesItem, TextItem, TokensItem
from layertap.service.probes import Probe, ProbeInput

MAX_CACHED = 4096  # probes, of about 300 bytes each
Key = tuple[str, str]  # a model's name and a fingerprint

WIDTH, HEIGHT = 320, 256
TEXT = "a photo of a cat beside a dog"
TOKENS = 8
FRAME = 64  # pixels of a side of a video's frames
LOUDNESS = 0.2  # of a sound, of 1
BITS = 64
FLOATS = ("float16", "float32", "float64")


class Prober:
    """Computes and caches the results of layers for the fixed input. For the event loop, which it never blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probes: LRUCache[Key, Probe] = LRUCache(MAX_CACHED)

    async def probe(
        self,
        model: str | None,
        selectors: tuple[Selector, ...],
        embedding: Embedding | None,
        ticket: Ticket,
        *,
        preprocessed: bool = False,
        sent: Sequence[object] = (),
    ) -> Features:
        """The fixed input's features, with a probe in each receipt; any LayertapError.

        ``preprocessed``: send it as tensors, not as a picture or text; ``sent``: items that determine its tower.
        """
        handle = await self._engine.get_handle(model, ticket)
        model_inputs = handle.model.model_inputs
        inputs = predict_rows(sent, model_inputs).tower if sent else find_tower(handle.model, selectors)
        kind, item = make_probe_input(inputs, preprocessed=preprocessed)
        request = ExtractRequest(model=model, selectors=selectors, embedding=embedding, isolated=True)
        with ticket.return_bytes():
            features = await self._engine.extract(request, SentInputs(((0, item),)), ticket)
        probed = await self._engine.run_in_thread(partial(_make_probes, kind, features), ticket.deadline)
        for receipt in probed.receipts.values():
            if receipt.probe is not None:
                self._probes.put((probed.model, receipt.fingerprint), receipt.probe)
        return probed

    async def add_probes(
        self, features: Features, request: ExtractRequest, sent: SentInputs, ticket: Ticket
    ) -> Features:
        """The features of a request with a probe in each receipt; any LayertapError."""
        keys = {key: (features.model, receipt.fingerprint) for key, receipt in features.receipts.items()}
        known = {key: probe for key, each in keys.items() if (probe := self._probes.get(each)) is not None}
        if len(known) == len(keys):
            return _add_probes(features, known)
        preprocessed = any(receipt.preprocessed == "caller" for receipt in features.receipts.values())
        items = [item for _, item in sent.items]
        of_request = request.model, request.selectors, request.embedding
        probed = await self.probe(*of_request, ticket, preprocessed=preprocessed, sent=items)
        probes = {key: receipt.probe for key, receipt in probed.receipts.items() if receipt.probe is not None}
        for key, probe in probes.items():  # rows of another shape have another fingerprint
            self._probes.put(keys[key], probe)
        return _add_probes(features, probes)


def check_probed(request: ExtractRequest) -> None:
    """RequestError if a request with probes uses options that a fixed input can't show."""
    for what, given in (
        ("interventions", request.interventions),
        ("an objective", request.objective),
        ("resume", request.resume),
        ("options of single inputs", request.input_options),
    ):
        if given:
            raise RequestError(f"a request with {what} has no probes", hint="leave 'probe' out")


def _make_probes(kind: ProbeInput, features: Features) -> Features:
    probes = {key: Probe.of(kind, array, features.scales.get(key)) for key, array in features.arrays.items()}
    return _add_probes(features, probes)


def _add_probes(features: Features, probes: dict[str, Probe]) -> Features:
    receipts = {key: replace(receipt, probe=probes.get(key)) for key, receipt in features.receipts.items()}
    return replace(features, receipts=receipts)


def make_probe_input(inputs: ModelInputs, *, preprocessed: bool) -> tuple[ProbeInput, LocalItem]:
    """The fixed input for a model: a picture, sound, video or text, else, or if ``preprocessed``, tensors."""
    if preprocessed:
        return "tensors", _make_arrays(inputs)
    if (sound := inputs.sound) is not None:  # a second of noise
        noise = _draw_uniform((sound.rate, sound.channels)) * LOUDNESS
        return "sound", SamplesItem(noise.astype(np.float32), sound.rate)
    if (video := inputs.video) is not None:
        frames = _draw_uniform((video.frames, FRAME, FRAME, 3)) * 255
        return "video", ArraysItem({inputs.pictures.specs[0].name: frames.astype(np.uint8)})
    if inputs.preprocess is not None and not inputs.takes_plain:
        return "picture", EncodedItem(make_picture())
    text = inputs.text
    if text is None or not text.takes_text:
        return "tensors", _make_arrays(inputs)
    if text.encode is not None:
        return "text", TextItem(TEXT)
    ids = _draw(min(TOKENS, text.max_tokens)) % np.uint64(text.vocabulary)
    return "tokens", TokensItem(tuple(int(each) for each in ids))


def make_picture() -> bytes:
    """A PNG with edges, slopes and noise in all three channels."""
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    checks = (down // 16 + across // 24) % 2 * 255
    drawn = np.stack([across * 255 // WIDTH, down * 255 // HEIGHT, checks], axis=-1)
    noise = (_draw(drawn.size) >> np.uint64(BITS - 6)).astype(np.int64).reshape(drawn.shape)
    stream = BytesIO()
    Image.fromarray((drawn * 3 // 4 + noise).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def _make_arrays(inputs: ModelInputs) -> ArraysItem:
    arrays: dict[str | None, Array] = {spec.name: _make_array(spec) for spec in inputs.specs}
    if inputs.text is not None and inputs.text.mask is not None:
        arrays[inputs.text.mask] = np.ones_like(arrays[inputs.text.mask])
    return ArraysItem(arrays, may_batch=False, by_name=True)


def _make_array(spec: InputSpec) -> Array:
    """The input's example, else uniform numbers of variance 1, or integers that the model accepts."""
    if (example := find_example(spec)) is not None:
        found: Array = example[0].float().numpy() if example.is_floating_point() else example[0].numpy()
        return found
    if spec.dtype.endswith(FLOATS):
        return (_draw_uniform(spec.shape) * sqrt(3)).astype(np.float32)
    drawn, (low, high) = _draw(prod(spec.shape)).reshape(spec.shape), spec.values or (0, 2)
    return (low + (drawn % np.uint64(high - low)).astype(np.int64)).astype(spec.dtype)


def _draw_uniform(shape: tuple[int, ...]) -> Array:
    """Random numbers from -1 to 1."""
    drawn: Array = _draw(prod(shape)).reshape(shape) / 2.0 ** (BITS - 1) - 1
    return drawn


def _draw(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Random 64-bit integers. numpy guarantees the output of bit generators, but not of the layers above."""
    return np.random.PCG64(0).random_raw(count)
