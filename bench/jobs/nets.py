"""A network that no library has: recurrent layers of three kinds, one after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZE = 32


class Recurrent(nn.Module):
    """A GRU, an LSTM in both directions, and a cell that is called at each step; its last state is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(SIZE, SIZE, batch_first=True)
        self.lstm = nn.LSTM(SIZE, SIZE // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 10)

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(self.gru(x)[0])[0]
        state = torch.zeros_like(states[:, 0])
        for step in range(x.shape[1]):
            state = self.cell(states[:, step], state)
        return self.head(state)
