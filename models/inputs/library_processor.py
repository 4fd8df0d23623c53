"""The image processor of a model's own library, for pictures of which no ``PreprocessSpec`` makes the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from torch import Tensor

from layertap.models.errors import InputError
from layertap.models.spec import Color, Decode, PreprocessSpec


@dataclass(frozen=True)
class LibraryProcessor:
    """What makes the row of a picture: ``run`` takes an RGB image and returns float32, (channels, height, width).

    ``run`` may be called by several threads at once, and can be pickled. ``settings`` is a digest of the processor's.
    ``size`` is the height and width of every row, None where a picture decides. ``background`` shows through
    transparent pictures. ``nearest`` are the steps that its settings seem to mean: they bound how far it enlarges.
    """

    name: str
    settings: str
    run: Callable[[Image.Image], Tensor] = field(compare=False, repr=False)
    size: tuple[int, int] | None = None
    background: Color | None = None
    nearest: PreprocessSpec | None = None

    def make_row(self, image: Image.Image) -> Tensor:
        """A picture's row; InputError where the library refuses the picture, or makes a row of another size."""
        try:
            row = self.run(image)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a third party's code raises anything
            detail = f"{self.name} can't take a picture of {image.width} by {image.height} ({type(error).__name__})"
            raise InputError(detail, hint="send one of another size, or a tensor") from error
        if row.ndim != 3 or self.size not in (None, tuple(row.shape[1:])):
            raise InputError(f"{self.name} made a row of {list(row.shape)} of this picture", hint="send a tensor")
        return row.contiguous()

    def describe(self) -> dict[str, Any]:
        """What decides its rows, as plain data."""
        background = {"background": self.background} if self.background is not None else {}
        return {"processor": self.name, "settings": self.settings, **background}

    def changes_pixels(self, decode: Decode) -> bool:
        """False: it gets whole pictures, however others are decoded."""
        del decode
        return False


Preprocessing = PreprocessSpec | LibraryProcessor
