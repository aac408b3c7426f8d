"""A handler that takes memory of its device on request."""

import numpy as np
import torch

from handlers.base import BaseHandler


class Memory(BaseHandler):
    """BERT's handler, and for ``{"allocate": n}`` one that allocates n bytes for a moment.

    With ``allocate`` in model-config.yaml it allocates so many bytes as it loads.
    """

    def initialize(self, context):
        super().initialize(context)
        self.allocate(self.model_yaml_config.get("allocate", 0))

    def handle(self, data, context):
        row = data[0].get("body") or data[0].get("data")
        if isinstance(row, dict):
            return [self.allocate(row["allocate"])] * len(data)
        return super().handle(data, context)

    def allocate(self, size):
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=self.device).numel()
        return np.empty(size, np.uint8).size  # torch's error on a CPU is no OutOfMemoryError
