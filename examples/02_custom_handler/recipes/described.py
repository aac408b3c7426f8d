"""Metadata for ``GET /models/{model}?customized=true``."""

from handlers.base import BaseHandler


class Described(BaseHandler):
    def describe_handle(self):
        return {"input": "two numbers", "output": "two numbers"}
