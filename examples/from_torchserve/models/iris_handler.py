import torch
from ts.torch_handler.base_handler import BaseHandler


class IrisHandler(BaseHandler):
    """Four lengths as a JSON list in; the scores of the three kinds out, as BaseHandler returns them."""

    def preprocess(self, data):
        return torch.tensor([row.get("data") or row.get("body") for row in data], device=self.device)
