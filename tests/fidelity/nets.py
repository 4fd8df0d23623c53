"""Small models of the classes of which torchvision only offers large ones."""

from __future__ import annotations

from torch import nn
from torchvision.models.video.mvit import MSBlockConfig, MViT

SMALL_CLIP = (3, 4, 32, 32)


def mvit_small() -> nn.Module:
    """All that an MViT is made of, for clips of 4 x 32 x 32: ``mvit_v2_s`` computes 7 GB for two of 16 x 224 x 224."""
    cube = [3, 3, 3]
    blocks = [
        MSBlockConfig(1, 16, 32, cube, cube, stride_q=[1, 1, 1], stride_kv=[1, 4, 4]),
        MSBlockConfig(2, 32, 48, cube, cube, stride_q=[1, 2, 2], stride_kv=[1, 2, 2]),
    ]
    module: nn.Module = MViT(
        spatial_size=SMALL_CLIP[2:],
        temporal_size=SMALL_CLIP[1],
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=10,
    )
    return module
