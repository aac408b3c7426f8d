"""A transformer encoder of MiniLM's size, hidden 384, 6 layers, for sequences of any length."""

import torch
from torch import nn


class Sentences(nn.Module):
    """Token ids ``[batch, tokens]``, padded with 0, in; each row's mean vector of 384 numbers out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 384)
        self.position = nn.Embedding(512, 384)
        layer = nn.TransformerEncoderLayer(384, 12, dim_feedforward=1536, activation="gelu", batch_first=True)
        # Without nested tensors padding is computed, as in what transformers, ONNX and torch.compile run.
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, tokens):
        there = tokens != 0
        hidden = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self.layers(hidden, src_key_padding_mask=~there)
        weights = there.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)
