"""Text in, a vector out, around MiniLM: as PyTorch's class or as an ONNX graph."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from handlers.base import BaseHandler


class MiniLMHandler(BaseHandler):
    """A sentence in, a list of 384 numbers out; a batch is padded to its longest sentence."""

    def initialize(self, context):
        super().initialize(context)
        file = Path(context.system_properties["model_dir"]) / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.enable_padding()
        self.tokenizer.enable_truncation(256)

    def preprocess(self, data):
        read = self.tokenizer.encode_batch([row.get("body") or row.get("data") for row in data])
        ids, mask = ([getattr(one, part) for one in read] for part in ("ids", "attention_mask"))
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def inference(self, data, *args, **kwargs):
        with torch.inference_mode():
            return self.model(**data)
