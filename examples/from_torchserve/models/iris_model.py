from torch import nn


class Iris(nn.Linear):
    """A linear model that scores three species of iris for four lengths in centimetres."""

    def __init__(self):
        super().__init__(4, 3)
