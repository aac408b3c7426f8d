"""The handler of BERT."""

from handlers.base import BaseHandler


class Numbers(BaseHandler):
    """A list of token ids in, a list of eight numbers out."""
