import os

import torch.distributed as dist

from handlers.causal_lm import CausalLM


class Storyteller(CausalLM):
    """As built in, and every answer says in which processes the model lies, and which part of it."""

    def initialize(self, context):
        super().initialize(context)
        # Every rank comes through here, so all of them meet in this call. Where a parameter is cut up, to_local is
        # the piece in this process.
        held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in self.model.parameters())
        self.ranks = [None] * dist.get_world_size()
        dist.all_gather_object(self.ranks, {"pid": os.getpid(), "parameters": held})

    def handle(self, data, context):
        return [answer | {"ranks": self.ranks} if isinstance(answer, dict) else answer
                for answer in super().handle(data, context)]
