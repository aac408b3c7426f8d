"""Recognise the text of the image of a line."""

from characters import alphabet, texts
from lines import decode_image, recogniser_input, scaled_width
from torchrelay import BaseHandler


class Reader(BaseHandler):
    """A handler that answers ``{"text", "score"}`` per strip. A batch is as wide as its widest strip."""

    def initialize(self, context):
        super().initialize(context)
        self.symbols = alphabet(self.model.session)

    def preprocess(self, data):
        strips = [decode_image(row["body"]) for row in data]
        return recogniser_input(strips, max(320, *map(scaled_width, strips)))

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [{"text": text, "score": round(score, 4)} for text, score in texts(data, self.symbols)]
