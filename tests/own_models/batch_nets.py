"""Models whose rows, time and sizes lie elsewhere than on the first axes of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.oracle import seeded


class TimeFirst(nn.Module):
    """Sound as (time, batch, channels): frames, a recurrent layer, attention over time, and a mean of it."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.rnn = nn.Linear(4, 6), nn.GRU(6, 6)
        self.attend, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, last = self.rnn(self.frames(x))
        x = x + self.attend(query=x, key=x, value=x, need_weights=False)[0]
        return torch.as_tensor(self.head(x.mean(0) + last[0]))


class Recurrence(nn.Module):
    """A loop over axis 0, without any layer of torch's that could tell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[1], 4), []
        for step in x:
            state = self.cell(torch.cat([step, state], -1)).tanh()
            states.append(state)
        return torch.as_tensor(self.head(torch.stack(states)))


class Positions(nn.Module):
    """Ids as (time, batch), with a table of as many positions as a row has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, 6), nn.RNN(6, 6), nn.Linear(6, 3)
        self.positions = nn.Parameter(torch.empty(5, 1, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.rnn(self.table(ids) + self.positions)[0][-1]))


class Stateful(nn.Module):
    """Begins with a state of its own, which is of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.rnn = nn.Linear(4, 6), nn.GRU(6, 6, 2)
        self.register_buffer("state", torch.empty(2, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.rnn(self.frames(x), self.state)[0])


class Packed(nn.Module):
    """Sequences of several lengths, packed for a recurrent layer."""

    def __init__(self, is_sorted: bool = False) -> None:
        super().__init__()
        self.is_sorted = is_sorted
        self.embed, self.rnn, self.head = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=self.is_sorted)
        out, (last, _) = self.rnn(packed)
        whole, _ = rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return {"whole": whole, "head": self.head(last[-1])}


class Lengths(nn.Module):
    """A number for each row: what is behind it does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        return torch.as_tensor(self.head((self.embed(x) * kept[..., None]).sum(1) / lengths[:, None]))


class Volume(nn.Module):
    """Scans as (batch, channels, depth, height, width)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv3d(1, channels, 3, padding=1), nn.InstanceNorm3d(channels), nn.PReLU()
        self.down, self.up = nn.Conv3d(channels, channels, 2, 2), nn.ConvTranspose3d(channels, channels, 2, 2)
        self.last, self.pool = nn.Conv3d(2 * channels, channels, 1), nn.AdaptiveAvgPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return torch.as_tensor(self.pool(self.last(torch.cat([x, self.up(self.down(x))], 1))))


class Graph(nn.Module):
    """Atoms, and bonds between them, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bond, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        x = self.atoms(atoms)
        sent = self.bond(x.gather(1, bonds[:, 0, :, None].expand(-1, -1, 6)))
        return torch.as_tensor(self.head(x.scatter_add(1, bonds[:, 1, :, None].expand(-1, -1, 6), sent).sum(1)))


class Translator(nn.Module):
    """Ids of two texts, each of a length of its own; a mask is of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.net = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        pad = None if attention_mask is None else attention_mask == 0
        x, y = self.table(input_ids), self.table(decoder_input_ids)
        return torch.as_tensor(self.head(self.net(x, y, src_key_padding_mask=pad, memory_key_padding_mask=pad)))


class Aligned(nn.Module):
    """Two tracks of one length: a pitch for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.mel, self.pitch, self.head = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(1, 6), nn.Linear(6, 3)

    def forward(self, mel: Tensor, pitch: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.mel(mel).mT + self.pitch(pitch[..., None])))


def _encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "encoder": lambda: _encoder(batch_first=False),
    "translation": lambda: nn.Transformer(8, 2, 1, 1, 12, custom_encoder=_encoder(batch_first=False)),
    "time_first": TimeFirst,
    "recurrence": Recurrence,
    "positions": Positions,
    "stateful": Stateful,
    "packed": Packed,
    "sorted": lambda: Packed(is_sorted=True),
    "lengths": Lengths,
    "volume": Volume,
    "graph": Graph,
    "translator": Translator,
    "aligned": Aligned,
}


def make(name: str) -> nn.Module:
    """One of the nets, with seeded weights."""
    return seeded(NETS[name](), 0).eval()
