from torch import nn


class Iris(nn.Linear):
    """Scores for three kinds of iris from four lengths in centimetres."""

    def __init__(self):
        super().__init__(4, 3)
