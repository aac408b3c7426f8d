from torch import Tensor, nn


class Digits(nn.Module):
    """A network that scores the digits 0 to 9 for images (n, 1, 8, 8), where 0 is paper and 16 is ink."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images / 16)
