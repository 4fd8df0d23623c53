"""``layertap serve`` whose workers decode one picture each, and give its row for every other: here and nowhere else.

Workers are copies of this process, so that they have what is put in place here.
"""

from __future__ import annotations

from collections.abc import Sequence

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.cli.main import main
from layertap.service.engine import executor
from layertap.service.engine.item_rows import try_to_decode
from layertap.service.engine.rows import Attempt
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

_first: list[Sequence[Attempt]] = []


def decode_first(item: LocalItem, inputs: ModelInputs, settings: Settings) -> Sequence[Attempt]:
    """What became of the first item that this process was given."""
    if not _first:
        _first.append(try_to_decode(item, inputs, settings))
    return _first[0]


if __name__ == "__main__":
    vars(executor)["try_to_decode"] = decode_first
    main()
