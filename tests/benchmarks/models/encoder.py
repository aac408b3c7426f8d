"""A transformer encoder, hidden 256, 4 layers: a model that is nearly all of the time."""

from torch import nn


class Encoder(nn.Module):
    """Token ids ``[batch, tokens]`` in, one vector of 8 numbers per row out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, 8)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)).mean(1))
