"""A picture in, the places of its lines of text out."""

from lines import detectable, lines, picture

from handlers.base import BaseHandler
from handlers.errors import PredictionException


class Detector(BaseHandler):
    """Answers each picture with ``[{"corners": four [x, y] clockwise from the top left one, "score"}]``."""

    def preprocess(self, data):
        return self._each(data, read)

    def inference(self, data):
        return [
            lines(self.model(detectable(one))[0, 0].numpy(), (one.shape[1], one.shape[0])) for one in data
        ]

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [[{"corners": line.corners.tolist(), "score": line.score} for line in found] for found in data]


def read(row):
    content = row.get("data") or row.get("body")
    if not isinstance(content, (bytes, bytearray)):
        raise PredictionException("send the image's bytes, as curl -T does", 400)
    return picture(content)
