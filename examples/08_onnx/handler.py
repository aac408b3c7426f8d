"""A file in, its type out: the first and the last bytes are the network's input, as its authors made it."""

import json
from pathlib import Path

import torch

from handlers.base import BaseHandler
from handlers.errors import PredictionException


class FileType(BaseHandler):
    def initialize(self, context):
        super().initialize(context)  # self.model is the graph, in ONNX Runtime
        self.config = json.loads(Path(context.system_properties["model_dir"], "config.min.json").read_text())

    def preprocess(self, data):
        """One row of tokens a file: bytes as they are, 256 where there are none."""
        block, head, tail = (self.config[key] for key in ("block_size", "beg_size", "end_size"))
        tokens = torch.full((len(data), head + tail), self.config["padding_token"], dtype=torch.int32)
        for index, row in enumerate(data):
            content = row.get("data") or row.get("body") or b""
            content = content.encode() if isinstance(content, str) else content  # what came as text/plain
            if not isinstance(content, (bytes, bytearray)):
                self.reject(index, PredictionException("send the file's bytes, as curl -T does", 400))
                continue
            begin, end = bytes(content[:block]).lstrip()[:head], bytes(content[-block:]).rstrip()[-tail:]
            if len(begin) < self.config["min_file_size_for_dl"]:
                self.reject(index, PredictionException("too few bytes to tell a type", 422))
                continue
            tokens[index, : len(begin)] = torch.tensor(list(begin), dtype=torch.int32)
            tokens[index, -len(end) :] = torch.tensor(list(end), dtype=torch.int32)
        return tokens

    def postprocess(self, data):
        scores, places = data.max(1)
        return [self.named(place, score) for place, score in zip(places.tolist(), scores.tolist())]

    def named(self, place, score):
        label = self.config["target_labels_space"][place]
        sure = score >= self.config["thresholds"].get(label, self.config["medium_confidence_threshold"])
        return {"type": self.config["overwrite_map"].get(label, label) if sure else "unknown", "score": score}
