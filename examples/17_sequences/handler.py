import os

import torch
from torchrelay import BaseHandler

PREDICTED_LETTERS = 24


class Reading(BaseHandler):
    """A handler whose rows are chunks of typed texts; it answers each text's predicted continuation."""

    def initialize(self, context):
        super().initialize(context)
        self.states = {}

    def preprocess(self, data):
        chunks = [row.get("data") or row.get("body") for row in data]
        texts = [
            chunk if isinstance(chunk, str) else bytes(chunk).decode("ascii", "replace") for chunk in chunks
        ]
        return [torch.tensor([min(ord(letter), 127) for letter in text]) for text in texts]

    def inference(self, data):
        sequence_ids = [self.context.get_sequence_id(row) for row in range(len(data))]
        initial = torch.zeros(self.model.size)
        with torch.inference_mode():
            states = torch.stack([self.states.get(id, initial) for id in sequence_ids])
            states = self.model.read(data, states)
            self.states |= dict(zip(sequence_ids, states))
            return self.model.generate(states, PREDICTED_LETTERS)

    def postprocess(self, data):
        return [{"expects": text, "process": os.getpid()} for text in data]

    def sequence_ended(self, sequence_id, why):
        self.states.pop(sequence_id, None)
