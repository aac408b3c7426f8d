"""all-MiniLM-L6-v2: a sentence in, one vector of length 1 out."""

from torch import nn
from transformers import BertConfig, BertModel


class MiniLM(nn.Module):
    """Token ids and mask ``[batch, tokens]`` in; the mean of each row's tokens, 384 numbers of length 1,
    out.
    """

    def __init__(self):
        super().__init__()
        config = BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            vocab_size=30522,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)
