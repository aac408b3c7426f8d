"""A line of text in, as an image, and its text out."""

from characters import alphabet, texts
from lines import picture, readable, width_of

from handlers.base import BaseHandler


class Reader(BaseHandler):
    """Answers each strip with ``{"text", "score"}``. A batch is as wide as its widest strip."""

    def initialize(self, context):
        super().initialize(context)
        self.symbols = alphabet(self.model.session)

    def preprocess(self, data):
        strips = [picture(row["body"]) for row in data]
        return readable(strips, max(320, *map(width_of, strips)))

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [{"text": text, "score": round(score, 4)} for text, score in texts(data, self.symbols)]
