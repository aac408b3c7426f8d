"""A BERT of random weights, whose sizes are in bert.json beside this file."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertModel

SIZES = Path(__file__).with_name("bert.json")


class Bert(nn.Module):
    """Token ids ``[batch, tokens]`` in, eight numbers for each row out."""

    def __init__(self, sizes=None):
        super().__init__()
        sizes = dict(sizes or json.loads(SIZES.read_text()))
        torch.manual_seed(sizes.pop("seed"))
        self.bert = BertModel(BertConfig(**sizes), add_pooling_layer=False)
        self.head = nn.Linear(sizes["hidden_size"], 8)

    def forward(self, ids):
        return self.head(self.bert(input_ids=ids).last_hidden_state.mean(1)).float()
