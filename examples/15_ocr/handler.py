"""Read the lines of text of an image with three networks: detection, orientation and recognition."""

from pathlib import Path

import numpy as np
from characters import alphabet, texts
from lines import crop_line, decode_image, detector_input, find_lines, recogniser_input, scaled_width
from torchrelay import BaseHandler, OnnxModel, PredictionException

from handlers.builtin.vision import decode_base64

DIRECTION_WIDTH = 192  # of a line, as the network for directions was trained
MAX_BATCH_WIDTH = 10_000  # pixels per recogniser batch: it outputs 18,710 numbers for every eighth pixel


class OCR(BaseHandler):
    """A handler that answers ``[{"text", "box", "score"}]`` per image.

    A box is four corners [x, y], clockwise from the top left.
    """

    def initialize(self, context):
        super().initialize(context)  # self.model is the detector
        directory = Path(context.system_properties["model_dir"])
        self.direction = OnnxModel(directory / "direction.onnx", self.device)
        self.recogniser = OnnxModel(directory / "recogniser.onnx", self.device)
        self.symbols = alphabet(self.recogniser.session)
        self.min_score = (self.model_yaml_config.get("ocr") or {}).get("text_score", 0.5)

    def preprocess(self, data):
        return self._map_rows(data, self.decode_row)

    def inference(self, data):
        """Return each image's lines as (corners, text, score), recognised in batches across images."""
        positions, strips = [], []
        for index, image in enumerate(data):
            probabilities = self.model(detector_input(image))[0, 0].numpy()
            found = find_lines(probabilities, (image.shape[1], image.shape[0]))
            positions += [(index, line.corners) for line in found]
            strips += [crop_line(image, line.corners) for line in found]
        answers = [[] for _ in data]
        for (index, corners), (text, score) in zip(positions, self.recognise(self.turn_upright(strips))):
            answers[index].append((corners, text, score))
        return answers

    def postprocess(self, data):
        return [
            [
                {"text": text, "box": np.rint(corners).astype(int).tolist(), "score": round(score, 4)}
                for corners, text, score in found
                if text and score >= self.min_score
            ]
            for found in data
        ]

    def decode_row(self, row):
        content = row.get("data") or row.get("body") or b""
        content = decode_base64(content) if isinstance(content, str) else content
        if not isinstance(content, (bytes, bytearray)):
            raise PredictionException("send the image's bytes, as curl -T does, or base64", 400)
        return decode_image(content)

    def turn_upright(self, strips):
        """Return the strips with upside-down ones rotated by 180 degrees."""
        turned = []
        for start in range(0, len(strips), 64):
            chunk = strips[start : start + 64]
            upside_down = self.direction(recogniser_input(chunk, DIRECTION_WIDTH))[:, 1].tolist()
            turned += [np.rot90(strip, 2) if p > 0.9 else strip for strip, p in zip(chunk, upside_down)]
        return turned

    def recognise(self, strips):
        """Return the (text, score) of each strip, in batches of similar width to limit the padding."""
        widths = [max(scaled_width(strip), 320) for strip in strips]
        results = [("", 0.0)] * len(strips)
        batch = []
        for index in sorted(range(len(strips)), key=widths.__getitem__):
            if batch and widths[index] * (len(batch) + 1) > MAX_BATCH_WIDTH:
                self.recognise_batch(batch, strips, widths, results)
                batch = []
            batch.append(index)
        if batch:
            self.recognise_batch(batch, strips, widths, results)
        return results

    def recognise_batch(self, indices, strips, widths, results):
        inputs = recogniser_input([strips[index] for index in indices], widths[indices[-1]])
        for index, text in zip(indices, texts(self.recogniser(inputs), self.symbols)):
            results[index] = text
