"""Networks that no library names: recurrent layers of three kinds, one after another, and a detector of few classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, fasterrcnn_mobilenet_v3_large_320_fpn

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


def build_detector() -> FasterRCNN:
    """Two stages on a MobileNetV3, without pretrained weights."""
    return fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=4)
