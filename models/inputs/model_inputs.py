"""What rows must be like: those that a model takes, or outputs of a layer that its forwards go on from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from layertap.models.catalog.catalog import Traits
from layertap.models.devices.dtypes import DTYPES
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.library_processor import Preprocessing
from layertap.models.inputs.text import TextSpec
from layertap.models.spec import Decode, InputSpec, Shapes, Tower


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and how pictures and texts become rows of them.

    ``model`` is the model's name. Floating rows reach the model in ``dtype``. ``decoder`` makes rows of pictures on
    the model's GPU, None where the CPU does. ``no_pictures`` says why it takes none. A row for a model of
    ``two_towers`` may have the inputs of one alone. ``tower`` says which, where these are the inputs of one.
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
        """The inputs of a model of which a survey has told how it takes padding."""
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
