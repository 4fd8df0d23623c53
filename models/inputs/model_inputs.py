"""What rows must be like: those that a model takes, or outputs of a layer that its forwards go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from layertap.models.catalog.catalog import LeftPadding, Traits
from layertap.models.devices.devices import DTYPES
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.spec import Decode, InputSpec, Shapes, Tower, Truncate

Encode = Callable[[str, int, Truncate], tuple[list[int], int]]
POSITIONS = "position_ids"  # by which a model is given the number of each token in its text
MIN_PADDED_LENGTH = 8  # tokens of the smallest bucket; each further one has twice as many
SURVEY_TOKENS = 32  # tokens of the row that a model is surveyed with


@dataclass(frozen=True)
class TextSpec:
    """What a model of texts takes.

    ``ids`` and ``mask`` are the names of its inputs; without a mask nothing may be padded. ``max_tokens`` counts the
    special ones; ``pad`` is the id that fills up, ``vocabulary`` the number of ids. ``encode`` takes a text, the most
    tokens and what is left out of a longer one, and gives the ids with the special ones around them, and how many were
    left out, for several threads at once; None if there is no tokenizer. ``is_fast``: it reads a million characters
    in about a second, and others at the same time. ``digest`` is of the tokenizer. ``pads``: whether a text may be
    padded and stand beside longer ones, or runs at its own length; ``left_padding``: how the model is given a text
    whose mask begins with zeros. ``truncate``: what is left out of a text of more than ``max_tokens`` where the request
    doesn't say. ``prompts`` are texts that a request puts in front of its own by name, ``default_prompt`` is the one of
    a request that names none. Where forwards go on from a layer its output stands in place of the ids: the vocabulary
    is 0 then, and ``axis`` the one of an item that has an entry for each token.
    """

    ids: str
    mask: str | None
    max_tokens: int
    pad: int
    vocabulary: int
    is_fast: bool = True
    encode: Encode | None = field(default=None, repr=False, compare=False)
    digest: str = ""
    axis: int = 0
    pads: bool = True
    left_padding: LeftPadding = "as sent"
    truncate: Truncate = "none"
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str = ""

    @property
    def is_read(self) -> bool:
        """Whether it takes texts and tokens, and not what a layer made of them."""
        return self.vocabulary > 0

    def get_padded_length(self, tokens: int) -> int:
        """The length to which this number of tokens is padded: few lengths, so that requests share forwards."""
        if self.mask is None or not self.pads:
            return tokens
        size = MIN_PADDED_LENGTH
        while size < tokens:
            size *= 2
        return min(size, self.max_tokens)

    def numbers(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the model is given the numbers of the tokens in rows, for padding in front would shift them."""
        return self.left_padding == "numbered" and self.has_left_padding(rows)

    def has_left_padding(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the mask leaves out the first position of a row that has any token."""
        if self.mask is None or self.mask not in rows:
            return False
        mask = rows[self.mask].bool()
        return bool((mask.any(1) & ~mask[:, 0]).any())

    def inputs(self) -> tuple[InputSpec, ...]:
        """The model's inputs, of a usual length; a row may be shorter, or as long as ``max_tokens``."""
        usual = (min(SURVEY_TOKENS, self.max_tokens),)
        ids = InputSpec(self.ids, usual, "int64", values=(0, self.vocabulary), longest=self.max_tokens)
        if self.mask is None:
            return (ids,)
        return ids, InputSpec(self.mask, usual, "int64", values=(1, 2), longest=self.max_tokens)


def number_tokens(mask: Tensor) -> Tensor:
    """The number of each position in its text (rows, tokens): 0 for the first that the mask keeps, and before it."""
    in_front = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    return (mask.new_ones(mask.shape).cumsum(1) - 1 - in_front).clamp(min=0)


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and how pictures and texts become rows of them.

    ``model`` is the model's name. Floating rows reach the model in ``dtype``. ``decoder`` makes rows of pictures on
    the model's GPU, None if the CPU does. ``no_pictures`` says why it takes none. A row for a model of
    ``two_towers`` may have the inputs of one alone. ``tower`` says which, where these are the inputs of one.
    ``takes_plain``: pictures become rows without any step, as a caller would make them.
    """

    model: str
    specs: tuple[InputSpec, ...]
    dtype: torch.dtype
    preprocess: Preprocessing | None = None
    text: TextSpec | None = None
    decode: Decode = "exact"
    decoder: DeviceDecoder | None = None
    no_pictures: str = ""
    two_towers: bool = False
    tower: Tower | None = None
    takes_plain: bool = False

    @cached_property
    def towers(self) -> tuple[ModelInputs, ...]:
        """Of two towers: the inputs of a text, those of a picture, and all of them, which come as tensors only."""
        if self.text is None or not self.two_towers:
            return ()
        whole = replace(self, two_towers=False, preprocess=None, text=None, decoder=None)
        of_text = {self.text.ids, self.text.mask}
        texts, pictures = (
            tuple(spec for spec in self.specs if (spec.name in of_text) == is_text) for is_text in (True, False)
        )
        return (
            replace(whole, specs=texts, text=self.text, tower="texts"),
            replace(whole, specs=pictures, preprocess=self.preprocess, decoder=self.decoder, tower="pictures"),
            whole,
        )

    @property
    def pictures(self) -> ModelInputs:
        """The inputs that a picture becomes."""
        return self.towers[1] if self.towers else self

    def for_shapes(self, shapes: Shapes) -> ModelInputs:
        """The inputs that rows of a shape have: towers' differ in how many these are, or in their axes."""
        axes = list(map(len, shapes))
        return next((each for each in self.towers if list(map(len, each.shapes)) == axes), self)

    @property
    def shapes(self) -> Shapes:
        """The configured shape of one row, input by input."""
        return tuple(spec.shape for spec in self.specs)

    @property
    def takes_pictures(self) -> bool:
        """Whether pictures may be sent."""
        return self.preprocess is not None and len(self.pictures.specs) == 1

    @property
    def preprocesses(self) -> bool:
        """Whether pictures or texts may be sent, of which the server makes rows."""
        return self.takes_pictures or (self.text is not None and self.text.encode is not None)

    def with_shapes(self, shapes: Shapes) -> tuple[InputSpec, ...]:
        """The inputs with other shapes of a row."""
        specs = self.for_shapes(shapes).specs
        return tuple(replace(spec, shape=shape) for spec, shape in zip(specs, shapes, strict=True))

    def with_traits(self, traits: Traits) -> ModelInputs:
        """The inputs, with what a survey found about how the model takes padding."""
        if self.text is None:
            return self
        return replace(
            self, text=replace(self.text, pads=self.text.pads and traits.pads, left_padding=traits.left_padding)
        )

    def replace_by_output(self, output: InputSpec) -> ModelInputs:
        """The inputs of forwards that go on from a layer: its output, and for texts the model's mask beside it."""
        dtype = DTYPES[output.dtype] if DTYPES[output.dtype].is_floating_point else self.dtype
        if self.text is None or output.longest is None:
            return ModelInputs(self.model, (replace(output, longest=None, long_axis=0),), dtype)
        text = replace(self.text, ids=output.name, vocabulary=0, encode=None, axis=output.long_axis)
        masks = tuple(spec for spec in self.specs if spec.name == self.text.mask)
        return ModelInputs(self.model, (output, *masks), dtype, text=text)
