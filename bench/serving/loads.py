"""What is asked of all contenders: a model and sets of its layers."""

from __future__ import annotations

from dataclasses import dataclass

LAYER = "avgpool"


@dataclass(frozen=True)
class Load:
    """One picture a request, the sets of layers in turn; each layer pooled, so that replies are small.

    With ``cut`` the loop runs a model that somebody truncated by hand behind the last of these layers.
    """

    title: str
    model: str
    sets: tuple[tuple[str, ...], ...] = ((LAYER,),)
    pool: str = "flatten"
    cut: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers of all sets, each once."""
        return tuple(dict.fromkeys(layer for each in self.sets for layer in each))

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing but the embedding."""
        return self.sets == ((LAYER,),)


# Each with the last layer, so that every forward is equally deep.
RESNET50 = (
    (LAYER,),
    ("layer1", LAYER),
    ("layer2", LAYER),
    ("layer3", LAYER),
    ("layer4", LAYER),
    ("layer2.0.bn1", LAYER),
    ("layer3", "layer4", LAYER),
    ("layer1", "layer3", LAYER),
)
MOBILENET = (
    (LAYER,),
    ("features.1", LAYER),
    ("features.4", LAYER),
    ("features.8", LAYER),
    ("features.12", LAYER),
    ("features.4.block.0.1", LAYER),
    ("features.8", "features.12", LAYER),
    ("features.1", "features.8", LAYER),
)
LOADS: dict[str, Load] = {
    "mobilenet": Load("MobileNetV3-small, avgpool", "mobilenet_v3_small"),
    "resnet50": Load("ResNet-50, avgpool", "resnet50"),
    "resnet50-layer2": Load("ResNet-50, layer2", "resnet50", (("layer2",),), pool="mean", cut=True),
    "resnet50-mixed": Load("ResNet-50, eight sets of layers in turn", "resnet50", RESNET50, pool="mean"),
    "mobilenet-mixed": Load("MobileNetV3-small, eight sets of layers in turn", "mobilenet_v3_small", MOBILENET, "mean"),
}
USUAL = ("mobilenet", "resnet50", "resnet50-layer2", "resnet50-mixed")
