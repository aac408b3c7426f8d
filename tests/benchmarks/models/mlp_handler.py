"""JSON in, JSON out around the perceptron, written as TorchServe's users write it."""

import torch
from ts.torch_handler.base_handler import BaseHandler


class PerceptronHandler(BaseHandler):
    """A list of 64 numbers in; ``{"class": 3, "logits": [10 numbers]}`` out."""

    def preprocess(self, data):
        return torch.tensor([row.get("body") or row.get("data") for row in data], dtype=torch.float32)

    def postprocess(self, data):
        return [{"class": c, "logits": row} for c, row in zip(data.argmax(1).tolist(), data.tolist())]
