"""Classify whether the image of a line of text is upside down."""

from lines import decode_image, recogniser_input
from torchrelay import BaseHandler

WIDTH = 192  # of a line, as the network was trained


class Direction(BaseHandler):
    """A handler that answers ``{"upside_down": probability}`` per strip."""

    def preprocess(self, data):
        return recogniser_input([decode_image(row["body"]) for row in data], WIDTH)

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [{"upside_down": probability} for probability in data[:, 1].tolist()]
