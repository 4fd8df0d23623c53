"""Whether a text's values stay the same with padding behind it, beside a longer text, and with padding in front."""

from __future__ import annotations

import torch
from torch import Tensor

from layertap.models.catalog.call_observer import Run
from layertap.models.catalog.same_values import has_same_values
from layertap.models.catalog.traits import LeftPadding
from layertap.models.devices.memory import is_device_error
from layertap.models.inputs.noise import make_noise
from layertap.models.inputs.text import POSITIONS, TextSpec, number_tokens
from layertap.models.spec import InputSpec

SHORT, LONG, IN_FRONT = 5, 64, 3  # tokens of a text, at most of its neighbour, of padding in front


def try_padding(run: Run, text: TextSpec, device: torch.device, tolerance: float) -> tuple[bool, LeftPadding]:
    """Whether texts may be padded to share forwards, and how padding in front of one is given to the model.

    Values are the same within ``tolerance`` of a tensor's largest number. What a device raises goes through: it says
    nothing of the model.
    """
    if text.mask is None or text.max_tokens < SHORT + IN_FRONT:
        return text.pads, "as sent"
    long = InputSpec(text.ids, (min(text.max_tokens, LONG),), "int64", values=(0, text.vocabulary))
    drawn = make_noise([long], device, torch.float32)[text.ids]
    short, padding = drawn[:1, :SHORT], torch.full_like(drawn[:1], text.pad)

    def forward(ids: Tensor, mask: Tensor, numbers: Tensor | None = None) -> object:
        rows = {text.ids: ids.clone(), text.mask or "": mask}
        return _try(run, rows if numbers is None else rows | {POSITIONS: numbers})

    alone = forward(short, torch.ones_like(short))
    if alone is None:  # so short a text is not taken: nothing can be compared
        return text.pads, "as sent"
    behind = torch.cat([torch.cat([short, padding[:, SHORT:]], 1), drawn[1:2]])
    mask = torch.ones_like(behind)
    mask[0, SHORT:] = 0
    pads = text.pads and has_same_values(alone, forward(behind, mask), tolerance)
    in_front = torch.cat([padding[:, :IN_FRONT], short], 1)
    mask = torch.ones_like(in_front)
    mask[:, :IN_FRONT] = 0
    if has_same_values(alone, forward(in_front, mask), tolerance, IN_FRONT):
        return pads, "as sent"
    is_numbered = has_same_values(alone, forward(in_front, mask, number_tokens(mask)), tolerance, IN_FRONT)
    return pads, "numbered" if is_numbered else "refused"


def _try(run: Run, rows: dict[str, Tensor]) -> object:
    """What a model returns; None where it raises, whatever that is."""
    try:
        return run(rows)
    except Exception as error:
        if is_device_error(error):
            raise
        return None
