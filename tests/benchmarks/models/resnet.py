"""A residual network of 18 layers at half of the usual width: what a photograph costs after it was
decoded.
"""

from torch import nn


def block(channels_in, channels, stride):
    layers = nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
        nn.BatchNorm2d(channels),
    )
    same = stride == 1 and channels_in == channels
    shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)
    return nn.ModuleList([layers, shortcut])


class ResNet(nn.Module):
    """Images ``[batch, 3, 224, 224]`` in, 1000 logits per row out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 7, 2, 3, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        widths += [(64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        self.blocks = nn.ModuleList(block(*width) for width in widths)
        self.head = nn.Linear(256, 1000)

    def forward(self, images):
        x = self.stem(images)
        for layers, shortcut in self.blocks:
            x = nn.functional.relu(layers(x) + shortcut(x))
        return self.head(x.mean((2, 3)))
