"""A model in memory: its replicas on their device, what it takes, what identifies it, and how rows run through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.devices import memory, transfer
from layertap.models.devices.devices import DTYPES, is_accelerator, use_threads
from layertap.models.devices.memory import Inputs
from layertap.models.errors import InputError, LayertapError, LoadError, describe_error, out_of_memory_error
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.inputs.model_inputs import POSITIONS, number_tokens, read_mask
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.inputs.preprocess import normalize, normalize_batch
from layertap.models.run.batch_slices import BatchActivations, RequestSlice
from layertap.models.run.compiled_plan import PlanGraphs
from layertap.models.run.extractor import extract_slices
from layertap.models.run.fingerprint import get_proven_part
from layertap.models.run.model_info import ModelInfo
from layertap.models.run.replica import Replica
from layertap.models.run.resumption import Resumption
from layertap.models.run.row_check import RowCheck
from layertap.models.spec import ModelSpec, PreprocessSpec

NO_INPUTS: Inputs = {}


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelInfo):
    """A model ready to run. Each replica belongs to one thread: everything that runs it happens there."""

    replicas: tuple[Replica, ...]
    graphs: tuple[PlanGraphs | None, ...] = ()  # of each warm plan, None for one that runs with hooks
    row_check: RowCheck = field(default_factory=RowCheck)  # which shared forwards are checked in this process
    # By the names of several devices, the model as loaded on each, the first one first; empty if it has one device.
    by_device: Mapping[str, LoadedModel] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The first replica's module."""
        return self.replica.module

    @property
    def replica(self) -> Replica:
        """The first replica."""
        return self.replicas[0]

    @property
    def device_name(self) -> str:
        """The names of all its devices, for people."""
        return ", ".join(self.by_device) or str(self.device)

    @property
    def hooks(self) -> int:
        """The number of our hooks on all replicas now: 0 when idle."""
        parts = self.by_device.values() or (self,)
        return sum(replica.hooks for part in parts for replica in part.replicas)

    def is_batch_invariant(self, rows: int) -> bool:
        """Whether a row gives the same bits at any index of a batch of this size, tried at a few indices.

        Raises whatever a forward of that many rows does.
        """
        if self.catalog.crosses_rows:
            return True
        noise = make_noise(self.inputs, self.device, self.dtype)
        outputs = [info for info in self.catalog.outputs if info.row_axis is not None]
        rows_by_index = []
        with torch.no_grad(), use_threads(1):
            for index in sorted({0, 1 % rows, rows // 2, rows - 1}):
                numbers = [int(each == index) for each in range(rows)]  # row 0 everywhere else
                batch = {name: value[numbers] for name, value in noise.items()}
                tensors = dict(iterate_tensors(self.replica(batch)))
                found = [RowTensor(tensors[info.path], info) for info in outputs if info.path in tensors]
                rows_by_index.append([each.select((index, index + 1)).value.clone() for each in found])
        first = rows_by_index[0]
        return all(torch.equal(*pair) for each in rows_by_index for pair in zip(each, first, strict=True))

    def run(
        self,
        replica: Replica,
        pieces: Sequence[Inputs],
        slices: Sequence[RequestSlice],
        padded_rows: int | None = None,
        resumption: Resumption | None = None,
        graphs: PlanGraphs | None = None,
    ) -> BatchActivations:
        """One forward of a replica for the requests that share it, their rows concatenated; results are on the device.

        ``padded_rows``: the forward's number of rows; the first row is repeated to fill it. With ``resumption`` the
        forward resumes from a layer, and the rows are that layer's output; with ``graphs`` one of them gives all
        its captures.
        OutOfMemoryError, raised after everything that the forward held is freed; InputError if the model raises
        IndexError or ValueError for these values, and does not for noise.
        """
        count = sum(len(next(iter(piece.values()))) for piece in pieces)
        rows = max(count, padded_rows or 0)
        try:
            if graphs is not None:
                rows = graphs.get_padded_rows(rows, replica)
                return graphs.run(self._assemble_batch(pieces, rows - count, None), slices, rows, replica)
            with replica.kept():  # also what a backward changes, which may run parts again
                forward = partial(self.run_rows, replica, pieces, rows - count, resumption)
                mask = self._join_masks(pieces, rows - count)
                return extract_slices(replica.modules, forward, slices, rows, mask, self.catalog.traits.stops)
        except (IndexError, ValueError) as error:  # for example, a token beyond the vocabulary
            # Requests that share a forward run again, each alone.
            if len(pieces) == 1 and self.probe(replica, {} if resumption else pieces[0], slices) is not None:
                raise
            raise InputError(f"the model does not take these values: {describe_error(error)}") from error
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        raise out_of_memory_error(count)

    def probe(
        self, replica: Replica, like: Inputs = NO_INPUTS, slices: Sequence[RequestSlice] = ()
    ) -> BaseException | None:
        """What a forward of noise, which succeeded at loading, raises now; None if it succeeds.

        ``like``: rows of the shape to try, if not the configured one; ``slices``: what to differentiate, without their
        changes, which are a caller's values too. Out of memory does not count: a smaller batch may fit.
        """
        specs = [replace(each, shape=tuple(like[each.name].shape[1:])) for each in self.inputs if each.name in like]
        one = [replace(each, start=0, stop=1, interventions=()) for each in slices if like]
        noise = specs or self.inputs, self.device, self.dtype
        try:
            with replica.kept():
                extract_slices(replica.modules, lambda: replica(make_noise_row(*noise)), one, 1)
                transfer.synchronize(self.device)  # kernels report errors when they are waited for
        except LayertapError:  # noise is not what a request's plan expects
            return None
        except BaseException as error:  # a model may raise SystemExit too
            return None if isinstance(error, MemoryError) or memory.is_out_of_memory(error) else error
        return None

    def cut_padding(self, pieces: Sequence[Inputs], slices: Sequence[RequestSlice]) -> Sequence[Inputs]:
        """Rows of texts without the padding that no text needs, unless a result has entries for it; views."""
        if self.text is None or any(each.depends_on_length for each in slices):
            return pieces
        lengths = [each.length or 0 for request in slices for each in request.captures]
        return self.text.cut_padding(pieces, max(lengths, default=0))

    def run_rows(
        self, replica: Replica, pieces: Sequence[Inputs], padding: int, resumption: Resumption | None
    ) -> object:
        """What a replica's forward returns for all pieces, and ``padding`` copies of the first row; as in ``run``."""
        batch = self._assemble_batch(pieces, padding, resumption)  # for each forward: a model may write to its input
        if resumption is None:
            return replica(batch)
        output = next(iter(batch.values()))  # the mask of a text comes after its ids
        return resumption.forward(replica, replica.modules, output)

    def decode_tokens(self, tokens: NDArray[np.int64]) -> tuple[str, ...]:
        """The texts of generated tokens (rows, steps), without special ones; negative ones are none."""
        decode = self.text.decode if self.text is not None else None
        return tuple(decode(row[row >= 0].tolist()) for row in tokens) if decode is not None else ()

    def _assemble_batch(
        self, pieces: Sequence[Inputs], padding: int, resumption: Resumption | None
    ) -> dict[str, Tensor]:
        """One batch of all pieces, copied: a model may write to its input. Pixels are normalised, but not a layer's."""
        batch: dict[str, Tensor] = {}
        how = self.model_inputs.preprocess if resumption is None else None
        floating = self.dtype if resumption is None else DTYPES[resumption.start.info.dtype]  # a layer may have its own
        for name, first in pieces[0].items():
            parts = [piece[name] for piece in pieces]
            if isinstance(how, PreprocessSpec):
                if not is_accelerator(self.device) and all(part.dtype == torch.uint8 for part in parts):
                    batch[name] = normalize_batch(parts, how, padding).to(floating)
                    continue
                parts = [normalize(part, how) if part.dtype == torch.uint8 else part for part in parts]
            if padding:
                parts.append(parts[0][:1].expand(padding, *first.shape[1:]))
            dtype = floating if parts[0].is_floating_point() else first.dtype
            batch[name] = transfer.to_device(parts, dtype, self.device)
        text = self.text
        if text is not None and resumption is None and any(text.numbers(piece) for piece in pieces):
            batch[POSITIONS] = number_tokens(batch[text.mask or ""])
        return batch

    def _join_masks(self, pieces: Sequence[Inputs], padding: int) -> Tensor | None:
        """The token mask of the batch, on the host: False for padding; None if the model has no mask."""
        name = self.model_inputs.mask
        if name is None or name not in pieces[0]:
            return None
        mask = read_mask(name, torch.cat([piece[name] for piece in pieces]))
        return torch.cat([mask, mask[:1].expand(padding, -1)]) if padding else mask


def join_devices(spec: ModelSpec, models: Mapping[str, LoadedModel]) -> LoadedModel:
    """Join the models loaded for ``spec`` on several devices, by device name; LoadError if they differ.

    A warm plan with graphs on only some devices runs with hooks on all: an answer must not depend on its device.
    """
    first = next(iter(models.values()))
    if len({(each.digest, get_proven_part(each.identity)) for each in models.values()}) > 1:
        raise LoadError("the model has other weights each time it is built", hint="devices need the same on each")
    graphs = zip(*(model.compiled for model in models.values()), strict=True)
    compiled = tuple(plans[0] if all(plan is not None for plan in plans) else None for plans in graphs)
    return replace(
        first,
        spec=replace(spec, dtype=first.spec.dtype),
        compiled=compiled,
        memory_bytes=sum(each.memory_bytes for each in models.values()),
        by_device=models,
    )
