"""Metadata for ``GET /models/{model}?customized=true``."""

from torchrelay import BaseHandler


class Described(BaseHandler):
    def describe_handle(self):
        return {"input": "two numbers", "output": "two numbers"}
