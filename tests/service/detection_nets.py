"""A small Faster R-CNN of torchvision, which takes a list of pictures and gives as many boxes as it finds."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign


def build(threshold: float = 0.2555) -> FasterRCNN:
    """A detector with the same weights each time; its scores lie around the threshold."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
    backbone.out_channels = 16  # type: ignore[assignment]
    return FasterRCNN(
        backbone,
        num_classes=4,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
        rpn_pre_nms_top_n_test=40,
        rpn_post_nms_top_n_test=12,
        box_score_thresh=threshold,
        box_detections_per_img=5,
    ).eval()
