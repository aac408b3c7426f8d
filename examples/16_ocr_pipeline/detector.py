"""Detect the lines of text in an image."""

from lines import decode_image, detector_input, find_lines
from torchrelay import BaseHandler, PredictionException


class Detector(BaseHandler):
    """A handler that answers ``[{"corners", "score"}]`` per image.

    The corners are four [x, y], clockwise from the top left one.
    """

    def preprocess(self, data):
        return self._map_rows(data, decode_row)

    def inference(self, data):
        return [
            find_lines(self.model(detector_input(image))[0, 0].numpy(), (image.shape[1], image.shape[0]))
            for image in data
        ]

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [[{"corners": line.corners.tolist(), "score": line.score} for line in found] for found in data]


def decode_row(row):
    content = row.get("data") or row.get("body")
    if not isinstance(content, (bytes, bytearray)):
        raise PredictionException("send the image's bytes, as curl -T does", 400)
    return decode_image(content)
