"""The inputs that rows must match: the model's own, or the output of a layer that its forwards resume from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from layertap.models.devices.devices import DTYPES
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.generation import FEW_STEPS, make_spec
from layertap.models.inputs.sound import Media, SoundProcessor
from layertap.models.inputs.video import VideoProcessor
from layertap.models.spec import PADDING_MASK, Decode, InputSpec, LeftPadding, Shapes, Tower, Truncate

Encode = Callable[[str, int, Truncate], tuple[list[int], int]]
EncodeChat = Callable[[Sequence[Mapping[str, str]], int, Truncate], tuple[list[int], int]]
EncodePair = Callable[[str, str, int, Truncate], tuple[list[int], list[int] | None, int]]
POSITIONS = "position_ids"  # the argument for the position of each token in its text
MIN_PADDED_LENGTH = 8  # tokens of the smallest bucket; each further bucket has twice as many
TOKEN_STEP = 4  # a forward has a multiple of so many tokens, so that there are few lengths
SURVEY_TOKENS = 32  # tokens of the row for a model's survey


@dataclass(frozen=True)
class TextSpec:
    """How a model takes text."""

    ids: str  # the input's name; if forwards resume from a layer, its output replaces the ids
    mask: str | None  # the input's name; without a mask nothing may be padded
    max_tokens: int  # with special tokens
    pad: int  # the padding id
    vocabulary: int  # the number of ids; 0 if a layer's output replaces them
    is_fast: bool = True  # ``encode`` takes a million characters in about a second, several texts at the same time
    # Text, token limit, side to truncate → ids with special tokens, number of dropped tokens; thread-safe. None if
    # there is no tokenizer. It puts the default prompt in front.
    encode: Encode | None = field(default=None, repr=False, compare=False)
    # Two texts → ids, their types if it gives any, number of tokens dropped of the longer text, or of both. None if
    # pairs can't be sent.
    encode_pair: EncodePair | None = field(default=None, repr=False, compare=False)
    # Messages, as ``encode``, by the folder's chat template; None if there is none. ``decode``: ids → text.
    encode_chat: EncodeChat | None = field(default=None, repr=False, compare=False)
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    stop: tuple[int, ...] | None = None  # the ids that end what the model generates; None if it generates nothing
    types: str | None = None  # the input's name, if the model takes token types: which text of a pair each token is of
    kinds: int = 0  # how many token types there are
    digest: str = ""  # of the tokenizer
    axis: int = 0  # the item's token axis
    pads: bool = True  # a text may be padded to share a batch with longer ones; else it runs at its own length
    left_padding: LeftPadding = "as sent"  # how a text whose mask begins with zeros is passed to the model
    truncate: Truncate = "none"  # if the request does not say
    side: Truncate = "end"  # the same for pairs
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)  # prefixes that a request selects by name
    default_prompt: str = ""  # used if a request names none
    # For each prompt the tokenizer of texts with it, and a text of what else it changes, empty if nothing.
    encoders: Mapping[str, Encode] = field(default_factory=dict, repr=False, compare=False)
    effects: Mapping[str, str] = field(default_factory=dict, hash=False)
    slow_prompts: frozenset[str] = frozenset()  # whose encoder is not as fast as ``encode``
    marks: int = 1  # the model takes so many times as many ids, which its tokenizer alone makes
    separators: tuple[int, int] | None = None  # the id, and its count in a single text, if pairs have token types

    @property
    def takes_text(self) -> bool:
        """Whether it takes texts and tokens, rather than a layer's output."""
        return self.vocabulary > 0

    def count_pairs(self, rows: Mapping[str, Tensor]) -> int:
        """How many rows of ids look like pairs, whose token types would not all be 0, and have none."""
        if self.separators is None or self.ids not in rows:
            return 0
        separator, single = self.separators
        found = (rows[self.ids] == separator).sum(1) > single
        return int((found & ~rows[self.types].any(1) if self.types is not None else found).sum())

    def complete(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows with token types of 0 if they have none, in the order of the model's inputs."""
        if self.types is None:
            return dict(rows)
        order = (self.ids, self.mask, self.types)
        whole = {self.types: torch.zeros_like(rows[self.ids]), **rows}
        return {name: whole[name] for name in order if name in whole}

    def get_padded_length(self, tokens: int) -> int:
        """The length to which so many tokens are padded; there are few lengths, so that requests share forwards."""
        if self.mask is None or not self.pads:
            return tokens
        size = MIN_PADDED_LENGTH
        while size < tokens:
            size *= 2
        return min(size, self.max_tokens)

    def cut_padding(self, pieces: Sequence[Mapping[str, Tensor]], least: int) -> Sequence[Mapping[str, Tensor]]:
        """Rows of one length without the padding behind the longest text, and behind ``least`` tokens; views.

        At least half of the length is left: a survey has seen what a forward does at both.
        """
        if self.mask is None or not self.takes_text or self.mask not in pieces[0]:
            return pieces
        masks = [piece[self.mask] for piece in pieces]
        size = masks[0].shape[1]
        longest = max(size - int(mask.any(0).flip(0).int().argmax()) for mask in masks)
        tokens = math.ceil(max(longest, least, size // 2) / TOKEN_STEP) * TOKEN_STEP
        if tokens >= size:
            return pieces
        names = {each.name for each in self.inputs()}
        return [
            {name: value[:, :tokens] if name in names else value for name, value in each.items()} for each in pieces
        ]

    def numbers(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the model must be given position ids, because left padding would shift the tokens' positions."""
        return self.left_padding == "numbered" and self.has_left_padding(rows)

    def has_left_padding(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the mask is 0 at the first position of a row that has any token."""
        if self.mask is None or self.mask not in rows:
            return False
        mask = rows[self.mask].bool()
        return bool((mask.any(1) & ~mask[:, 0]).any())

    def inputs(self) -> tuple[InputSpec, ...]:
        """The model's inputs, at the survey's length; a row may be shorter, or as long as ``max_tokens``."""
        usual = (min(SURVEY_TOKENS, self.max_tokens),)
        values = {self.ids: (0, self.vocabulary * self.marks), self.mask: (1, 2), self.types: (0, self.kinds)}
        return tuple(
            InputSpec(name, usual, "int64", values=each, longest=self.max_tokens)
            for name, each in values.items()
            if name is not None
        )


def read_mask(name: str, value: Tensor) -> Tensor:
    """A mask input (rows, tokens) as true for tokens and false for padding, by what its name says of it."""
    mask = value.bool()
    return ~mask if name.endswith(PADDING_MASK) else mask


def number_tokens(mask: Tensor) -> Tensor:
    """Position ids (rows, tokens): 0 up to the first token that the mask keeps, then counting up."""
    in_front = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    return (mask.new_ones(mask.shape).cumsum(1) - 1 - in_front).clamp(min=0)


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and how pictures, sounds, videos and texts become rows of them."""

    model: str  # its name
    specs: tuple[InputSpec, ...]
    dtype: torch.dtype  # floating rows are cast to it
    preprocess: Media | None = None
    text: TextSpec | None = None
    decode: Decode = "exact"
    decoder: DeviceDecoder | None = None  # decodes pictures on the model's GPU; None if the CPU does
    no_pictures: str = ""  # why pictures can't be sent
    two_towers: bool = False  # a row may have the inputs of one tower only
    tower: Tower | None = None  # if these are the inputs of one
    of_layer: bool = False  # outputs of a layer, whose sizes follow from the model's inputs: here any are taken
    takes_plain: bool = False  # pictures become rows without any step, as a caller would make them

    @cached_property
    def towers(self) -> tuple[ModelInputs, ...]:
        """With two towers: the inputs of a text, those of a picture, and all of them, which must be sent as tensors."""
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
    def mask(self) -> str | None:
        """The input that tells which tokens of a row are padding; None if it has none."""
        if self.text is not None:
            return self.text.mask
        return next((spec.name for spec in self.specs if spec.is_mask), None)

    @property
    def pictures(self) -> ModelInputs:
        """The inputs for a picture."""
        return self.towers[1] if self.towers else self

    def for_shapes(self, shapes: Shapes) -> ModelInputs:
        """The inputs that match the shapes of a row: towers differ in the number of inputs, or of axes.

        A text that is continued has one input more.
        """
        if steps := self.count_steps(shapes):
            return replace(self, specs=(*self.specs, make_spec(steps)))
        axes = list(map(len, shapes))
        return next((each for each in self.towers if list(map(len, each.shapes)) == axes), self)

    def count_steps(self, shapes: Shapes) -> int:
        """How many tokens are generated after a text of this shape; 0: it is taken as it is."""
        return shapes[-1][1] if len(shapes) > len(self.specs) else 0

    def make_continued(self, steps: int) -> Shapes:
        """The configured shape of a text, shortened to leave room for so many tokens that are generated after it."""
        room = self.text.max_tokens - max(steps, FEW_STEPS) if self.text is not None else 0
        return (*((min(length, room),) for (length,) in self.shapes), make_spec(steps).shape)

    def make_few(self, shapes: Shapes, more: int) -> Shapes:
        """The shape of a text that is longer by ``more`` tokens, and continued by a few."""
        return (*((length + more,) for (length,) in shapes[:-1]), make_spec(FEW_STEPS).shape)

    @property
    def shapes(self) -> Shapes:
        """The configured shape of one row, input by input."""
        return tuple(spec.shape for spec in self.specs)

    @property
    def batch_axes(self) -> dict[str, int]:
        """The axis of a batch that holds rows, of inputs where that is not the first."""
        return {spec.name: spec.batch_axis for spec in self.specs if spec.batch_axis}

    @property
    def takes_pictures(self) -> bool:
        """Whether pictures may be sent."""
        others = SoundProcessor | VideoProcessor | None
        return not isinstance(self.preprocess, others) and len(self.pictures.specs) == 1

    @property
    def sound(self) -> SoundProcessor | None:
        """How sounds become rows; None if they may not be sent."""
        return self.preprocess if isinstance(self.preprocess, SoundProcessor) else None

    @property
    def video(self) -> VideoProcessor | None:
        """How videos become rows; None if they may not be sent."""
        return self.preprocess if isinstance(self.preprocess, VideoProcessor) else None

    @property
    def frames(self) -> int | None:
        """How many time steps the mask of every sound has; None if that depends on the sound, or there is none."""
        return self.sound.frames if self.sound is not None else None

    @property
    def takes_media(self) -> bool:
        """Whether pictures, sounds or videos may be sent."""
        return self.takes_pictures or self.sound is not None or self.video is not None

    @property
    def preprocesses(self) -> bool:
        """Whether pictures, sounds, videos or texts may be sent, which the server turns into rows."""
        return self.takes_media or (self.text is not None and self.text.encode is not None)

    def with_shapes(self, shapes: Shapes) -> tuple[InputSpec, ...]:
        """The inputs with the given shapes of a row."""
        specs = self.for_shapes(shapes).specs
        return tuple(replace(spec, shape=shape) for spec, shape in zip(specs, shapes, strict=True))

    def with_padding(self, pads: bool, left_padding: LeftPadding) -> ModelInputs:
        """The inputs, with the survey's findings about padding."""
        if self.text is None:
            return self
        return replace(self, text=replace(self.text, pads=self.text.pads and pads, left_padding=left_padding))

    def replace_by_output(self, output: InputSpec) -> ModelInputs:
        """The inputs of forwards that resume from a layer: its output, and for texts also the model's mask."""
        dtype = DTYPES[output.dtype] if DTYPES[output.dtype].is_floating_point else self.dtype
        if self.text is None or output.longest is None:
            return ModelInputs(self.model, (replace(output, longest=None, long_axis=0),), dtype, of_layer=True)
        text = replace(self.text, ids=output.name, vocabulary=0, encode=None, types=None, axis=output.long_axis)
        masks = tuple(spec for spec in self.specs if spec.name == self.text.mask)
        return ModelInputs(self.model, (output, *masks), dtype, text=text)
