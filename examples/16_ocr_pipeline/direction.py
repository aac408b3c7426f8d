"""A line of text in, as an image, and out comes how sure it is that the line stands on its head."""

from lines import picture, readable

from handlers.base import BaseHandler

WIDTH = 192  # of a line, as the network was trained


class Direction(BaseHandler):
    """Answers each strip with ``{"upside_down": probability}``."""

    def preprocess(self, data):
        return readable([picture(row["body"]) for row in data], WIDTH)

    def postprocess(self, data):
        for index in range(len(data)):
            self.context.set_response_content_type(index, "application/json")
        return [{"upside_down": probability} for probability in data[:, 1].tolist()]
