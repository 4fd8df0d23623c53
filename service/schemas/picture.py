"""How a picture of results is drawn, as a body describes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from layertap.service.pictures.options import MAX_TILES, Order, PictureOptions
from layertap.service.schemas.base import StrictBody


class PictureBody(StrictBody):
    """What a picture shows of each result."""

    tiles: Annotated[int, Field(ge=1, le=MAX_TILES)] = 16
    order: Order = "first"

    def to_options(self) -> PictureOptions:
        """The options of a picture."""
        return PictureOptions(self.tiles, self.order)
