from torch import Tensor, nn


class MLP(nn.Module):
    """A network that scores the digits 0 to 9 for 64 pixels, each from 0 to 16: (n, 64) -> (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels / 16)
