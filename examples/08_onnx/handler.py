"""Detect the type of a file from its first and last bytes, with magika's preprocessing."""

import json
from pathlib import Path

import torch
from torchrelay import BaseHandler, PredictionException


class FileType(BaseHandler):
    def initialize(self, context):
        super().initialize(context)  # self.model is the graph, in ONNX Runtime
        self.config = json.loads(Path(context.system_properties["model_dir"], "config.min.json").read_text())

    def preprocess(self, data):
        """Return a row of tokens per file: its bytes, padded with 256."""
        block, head, tail = (self.config[key] for key in ("block_size", "beg_size", "end_size"))
        tokens = torch.full((len(data), head + tail), self.config["padding_token"], dtype=torch.int32)
        for index, row in enumerate(data):
            content = row.get("data") or row.get("body") or b""
            content = content.encode() if isinstance(content, str) else content  # sent as text/plain
            if not isinstance(content, (bytes, bytearray)):
                self.reject(index, PredictionException("send the file's bytes, as curl -T does", 400))
                continue
            head_bytes, tail_bytes = (
                bytes(content[:block]).lstrip()[:head],
                bytes(content[-block:]).rstrip()[-tail:],
            )
            if len(head_bytes) < self.config["min_file_size_for_dl"]:
                self.reject(index, PredictionException("too few bytes to tell a type", 422))
                continue
            tokens[index, : len(head_bytes)] = torch.tensor(list(head_bytes), dtype=torch.int32)
            tokens[index, -len(tail_bytes) :] = torch.tensor(list(tail_bytes), dtype=torch.int32)
        return tokens

    def postprocess(self, data):
        scores, indices = data.max(1)
        return [self.describe_type(index, score) for index, score in zip(indices.tolist(), scores.tolist())]

    def describe_type(self, index, score):
        label = self.config["target_labels_space"][index]
        is_certain = score >= self.config["thresholds"].get(label, self.config["medium_confidence_threshold"])
        return {
            "type": self.config["overwrite_map"].get(label, label) if is_certain else "unknown",
            "score": score,
        }
