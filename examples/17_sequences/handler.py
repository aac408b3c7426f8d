import os

import torch

from handlers.base import BaseHandler

EXPECTED = 24  # letters


class Reading(BaseHandler):
    """Each row is a piece of a text that somebody types; the answer is how it goes on."""

    def initialize(self, context):
        super().initialize(context)
        self.memories = {}

    def preprocess(self, data):
        pieces = [row.get("data") or row.get("body") for row in data]
        texts = [piece if isinstance(piece, str) else bytes(piece).decode("ascii", "replace") for piece in pieces]
        return [torch.tensor([min(ord(letter), 127) for letter in text]) for text in texts]

    def inference(self, data):
        names = [self.context.get_sequence_id(row) for row in range(len(data))]
        nothing = torch.zeros(self.model.size)
        with torch.inference_mode():
            before = torch.stack([self.memories.get(name, nothing) for name in names])
            after = self.model.read(data, before)
            self.memories |= dict(zip(names, after))
            return self.model.go_on(after, EXPECTED)

    def postprocess(self, data):
        return [{"expects": text, "process": os.getpid()} for text in data]

    def sequence_ended(self, sequence_id, why):
        self.memories.pop(sequence_id, None)
