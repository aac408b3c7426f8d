import os

import torch.distributed as dist

from handlers.builtin.llm import LanguageModel


class Storyteller(LanguageModel):
    """The built-in handler, with the processes of the model and their parameters in its description."""

    async def initialize(self, context):
        await super().initialize(context)
        # All ranks must run this collective. to_local is the part of a sharded parameter in this process.
        parameters = sum(
            getattr(p, "to_local", lambda p=p: p)().numel() for p in self.engine.model.parameters()
        )
        self.ranks = [None] * dist.get_world_size()
        dist.all_gather_object(self.ranks, {"pid": os.getpid(), "parameters": parameters})

    def describe_handle(self):
        return super().describe_handle() | {"ranks": self.ranks}
