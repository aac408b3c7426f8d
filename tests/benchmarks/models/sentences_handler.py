"""JSON in, JSON out around the encoder of sentences."""

import torch
from ts.torch_handler.base_handler import BaseHandler


class SentencesHandler(BaseHandler):
    """A list of token ids in, ``{"tokens": 12, "padded": 40, "vector": [8 numbers]}`` out."""

    def preprocess(self, data):
        self.rows = [torch.tensor(row.get("body") or row.get("data")) for row in data]
        return torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True)

    def postprocess(self, data):
        padded = max(map(len, self.rows))
        rows = zip(self.rows, data[:, :8].tolist(), strict=True)
        return [{"tokens": len(row), "padded": padded, "vector": vector} for row, vector in rows]
