"""Probes of what requests ask for: one more row, alone in its forward, once for each result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layertap.models.errors import RequestError
from layertap.models.lru_cache import LRUCache
from layertap.models.selection.hook_points import Embedding, Selector
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.plan.planner import find_tower
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.rows.predicted_rows import predict_rows
from layertap.service.explain.probe_inputs import make_probe_input
from layertap.service.features import Features
from layertap.service.probes import Probe

MAX_CACHED = 4096  # probes, of about 300 bytes each
Key = tuple[str, str]  # a model's name and a fingerprint


class Prober:
    """Answers what layers give for the fixed input, and remembers it. Used on the event loop, which it never blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probes: LRUCache[Key, Probe] = LRUCache(MAX_CACHED)

    async def probe(
        self,
        model: str | None,
        selectors: tuple[Selector, ...],
        embedding: Embedding | None,
        deadline: float,
        *,
        preprocessed: bool = False,
        sent: Sequence[object] = (),
    ) -> Features:
        """The fixed input's features, with a probe in each receipt; any error of the tree.

        ``preprocessed``: it is sent as tensors, not as picture or text; ``sent``: to the tower that takes such items.
        """
        with self._engine.admission.admit(deadline) as ticket:
            return await self._probe(model, selectors, embedding, ticket, preprocessed, sent)

    async def _probe(
        self,
        model: str | None,
        selectors: tuple[Selector, ...],
        embedding: Embedding | None,
        ticket: Ticket,
        preprocessed: bool,
        sent: Sequence[object] = (),
    ) -> Features:
        handle = await self._engine.get_handle(model, ticket)
        model_inputs = handle.model.model_inputs
        inputs = predict_rows(sent, model_inputs).tower if sent else find_tower(handle.model, selectors)
        kind, item = make_probe_input(inputs, preprocessed=preprocessed)
        request = ExtractRequest(
            model=model, items=((0, item),), selectors=selectors, embedding=embedding, isolated=True
        )
        with ticket.return_bytes():
            features = await self._engine.extract(request, ticket)
        probes = {key: Probe.of(kind, array, features.scales.get(key)) for key, array in features.arrays.items()}
        for key, probe in probes.items():
            self._probes.put((features.model, features.receipts[key].fingerprint), probe)
        return _add_probes(features, probes)

    async def add_probes(self, features: Features, request: ExtractRequest, ticket: Ticket) -> Features:
        """The features of a request with a probe in each receipt; any error of the tree."""
        keys = {key: (features.model, receipt.fingerprint) for key, receipt in features.receipts.items()}
        known = {key: probe for key, each in keys.items() if (probe := self._probes.get(each)) is not None}
        if len(known) == len(keys):
            return _add_probes(features, known)
        preprocessed = any(receipt.preprocessed == "caller" for receipt in features.receipts.values())
        sent = [item for _, item in request.items]
        probed = await self._probe(request.model, request.selectors, request.embedding, ticket, preprocessed, sent)
        probes = {key: receipt.probe for key, receipt in probed.receipts.items() if receipt.probe is not None}
        for key, probe in probes.items():  # where rows of another shape were sent it has another fingerprint
            self._probes.put(keys[key], probe)
        return _add_probes(features, probes)


def check_probed(request: ExtractRequest) -> None:
    """RequestError where probes are asked for of what a fixed input can't show."""
    for what, given in (
        ("interventions", request.interventions),
        ("an objective", request.objective),
        ("resume", request.resume),
        ("options of single inputs", request.input_options),
    ):
        if given:
            raise RequestError(f"a request with {what} has no probes", hint="leave 'probe' out")


def _add_probes(features: Features, probes: dict[str, Probe]) -> Features:
    receipts = {key: replace(receipt, probe=probes.get(key)) for key, receipt in features.receipts.items()}
    return replace(features, receipts=receipts)
