from torch import nn


class Digits(nn.Linear):
    """A linear model that scores the digits 0 to 9 for images of shape (n, 64), from 0 to 16."""

    def __init__(self):
        super().__init__(64, 10)
