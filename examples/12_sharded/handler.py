import os

import torch.distributed as dist

from handlers.llm import LanguageModel


class Storyteller(LanguageModel):
    """As built in, and its description says in which processes the model lies, and which part of it."""

    async def initialize(self, context):
        await super().initialize(context)
        # Every rank comes through here, so all of them meet in this call. Where a parameter is cut up, to_local is
        # the piece in this process.
        held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in self.engine.model.parameters())
        self.ranks = [None] * dist.get_world_size()
        dist.all_gather_object(self.ranks, {"pid": os.getpid(), "parameters": held})

    def describe_handle(self):
        return super().describe_handle() | {"ranks": self.ranks}
