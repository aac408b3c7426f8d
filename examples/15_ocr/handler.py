"""A picture in, its lines of text out: one network finds the lines, one says which stand on their heads, one reads."""

from pathlib import Path

import numpy as np
from characters import alphabet, texts
from lines import cut, detectable, lines, picture, readable, width_of

from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.onnx import OnnxModel
from handlers.vision import from_base64

DIRECTION_WIDTH = 192  # of a line, as the network for directions was trained
AT_ONCE = 10_000  # pixels of width in the recogniser at a time: it gives 18,710 numbers for every eighth one


class OCR(BaseHandler):
    """Answers each picture with ``[{"text", "box": four corners [x, y] clockwise from the top left, "score"}]``."""

    def initialize(self, context):
        super().initialize(context)  # self.model is the detector
        directory = Path(context.system_properties["model_dir"])
        self.direction = OnnxModel(directory / "direction.onnx", self.device)
        self.recogniser = OnnxModel(directory / "recogniser.onnx", self.device)
        self.symbols = alphabet(self.recogniser.session)
        self.least = (self.model_yaml_config.get("ocr") or {}).get("text_score", 0.5)

    def preprocess(self, data):
        return self._each(data, self.read)

    def inference(self, data):
        """For each picture its lines as (corners, text, score). All the lines of a batch are read together."""
        places, strips = [], []
        for index, one in enumerate(data):
            found = lines(self.model(detectable(one))[0, 0].numpy(), (one.shape[1], one.shape[0]))
            places += [(index, line.corners) for line in found]
            strips += [cut(one, line.corners) for line in found]
        answers = [[] for _ in data]
        for (index, corners), (text, score) in zip(places, self.recognised(self.upright(strips))):
            answers[index].append((corners, text, score))
        return answers

    def postprocess(self, data):
        return [
            [
                {"text": text, "box": np.rint(corners).astype(int).tolist(), "score": round(score, 4)}
                for corners, text, score in found
                if text and score >= self.least
            ]
            for found in data
        ]

    def read(self, row):
        content = row.get("data") or row.get("body") or b""
        content = from_base64(content) if isinstance(content, str) else content
        if not isinstance(content, (bytes, bytearray)):
            raise PredictionException("send the image's bytes, as curl -T does, or base64", 400)
        return picture(content)

    def upright(self, strips):
        """The strips, and those turned by half a circle which stand on their heads."""
        turned = []
        for start in range(0, len(strips), 64):
            some = strips[start : start + 64]
            heads = self.direction(readable(some, DIRECTION_WIDTH))[:, 1].tolist()
            turned += [np.rot90(strip, 2) if head > 0.9 else strip for strip, head in zip(some, heads)]
        return turned

    def recognised(self, strips):
        """(text, score) of each strip; strips of like width run together, so that little is read in vain."""
        widths = [max(width_of(strip), 320) for strip in strips]
        read = [("", 0.0)] * len(strips)
        some = []
        for index in sorted(range(len(strips)), key=widths.__getitem__):
            if some and widths[index] * (len(some) + 1) > AT_ONCE:
                self.recognise(some, strips, widths, read)
                some = []
            some.append(index)
        if some:
            self.recognise(some, strips, widths, read)
        return read

    def recognise(self, some, strips, widths, read):
        batch = readable([strips[index] for index in some], widths[some[-1]])
        for index, text in zip(some, texts(self.recogniser(batch), self.symbols)):
            read[index] = text
