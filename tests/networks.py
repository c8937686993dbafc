"""Published networks in plain torch, without weights: on the meta device a forward pass only follows shapes."""

import math

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """A block of ResNet-50 (arXiv 1512.03385, figure 5), with the stride in its 3 × 3 convolution."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *unit(given, width, 1, act=nn.ReLU()),
            *unit(width, width, 3, stride, act=nn.ReLU()),
            *unit(width, 4 * width, 1),
        )
        same = stride == 1 and given == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*unit(given, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return a picture of 4 × width channels."""
        return torch.relu(self.body(x) + self.shortcut(x))


def unit(
    given: int, made: int, size: int, stride: int = 1, *, groups: int = 1, act: nn.Module | None = None
) -> list[nn.Module]:
    """Return convolution, normalisation and activation."""
    layer = nn.Conv2d(given, made, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(made), *([act] if act else [])]


def resnet50() -> nn.Module:
    """Return ResNet-50 (arXiv 1512.03385, table 1)."""
    with torch.device("meta"):
        layers, given = [*unit(3, 64, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)], 64
        for width, times, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(times):
                layers.append(Bottleneck(given, width, 1 if i else stride))
                given = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


class Gate(nn.Module):
    """Squeeze and excitation (arXiv 1709.01507)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        down, up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, nn.SiLU(), up, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Return the picture, its channels scaled."""
        return x * self.scale(x)


class Inverted(nn.Module):
    """A block of EfficientNet: expand, filter each channel, gate, project (arXiv 1905.11946, table 1)."""

    def __init__(self, given: int, made: int, *, expand: int, size: int, stride: int) -> None:
        super().__init__()
        width = given * expand
        self.same = stride == 1 and given == made
        self.body = nn.Sequential(
            *(unit(given, width, 1, act=nn.SiLU()) if expand > 1 else []),
            *unit(width, width, size, stride, groups=width, act=nn.SiLU()),
            Gate(width, max(1, given // 4)),
            *unit(width, made, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next picture."""
        return x + self.body(x) if self.same else self.body(x)


STAGES = (
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)


def efficientnet(wide: float, deep: float) -> nn.Module:
    """Return EfficientNet-B0 scaled in width and depth (arXiv 1905.11946, table 1)."""

    def scaled(channels: int) -> int:
        rounded = max(8, int(channels * wide + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * channels * wide else rounded

    with torch.device("meta"):
        given = scaled(32)
        layers = unit(3, given, 3, 2, act=nn.SiLU())
        for expand, size, stride, channels, times in STAGES:
            for i in range(math.ceil(times * deep)):
                made, step = scaled(channels), 1 if i else stride
                layers.append(Inverted(given, made, expand=expand, size=size, stride=step))
                given = made
        layers += unit(given, 4 * given, 1, act=nn.SiLU())
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * given, 1000))


def efficientnet_b0() -> nn.Module:
    """Return EfficientNet-B0."""
    return efficientnet(1.0, 1.0)


def efficientnet_b4() -> nn.Module:
    """Return EfficientNet-B4: 1.4 times as wide, 1.8 times as deep."""
    return efficientnet(1.4, 1.8)


class Bert(nn.Module):
    """BERT-base for questions and answers (arXiv 1810.04805): 12 layers of width 768 with 12 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, 768), nn.Embedding(512, 768)
        self.norm, self.span = nn.LayerNorm(768), nn.Linear(768, 2)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return two scores for every token."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.span(self.layers(self.norm(self.words(ids) + self.places(places))))


def bert() -> nn.Module:
    """Return BERT-base."""
    with torch.device("meta"):
        return Bert()


def lstm() -> nn.Module:
    """Return two layers of 1024 LSTM units."""
    with torch.device("meta"):
        return nn.LSTM(1024, 1024, 2, batch_first=True)
