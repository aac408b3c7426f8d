"""JSON in, JSON out around the encoder."""

import torch
from ts.torch_handler.base_handler import BaseHandler


class EncoderHandler(BaseHandler):
    """A list of token ids in; ``{"vector": [8 numbers], "threads": 1}`` out.

    ``threads`` is what torch computes with here, so that a bare loop can be given the same.
    """

    def preprocess(self, data):
        return torch.tensor([row.get("body") or row.get("data") for row in data])

    def postprocess(self, data):
        threads = torch.get_num_threads()
        return [{"vector": row, "threads": threads} for row in data.tolist()]
