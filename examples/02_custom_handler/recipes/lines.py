"""An envelope: a format around a handler."""

from handlers.envelopes.base import BaseEnvelope


class Lines(BaseEnvelope):
    def parse_input(self, data):
        return [row["body"].split() for row in data]

    def format_output(self, data):
        return [" ".join(map(str, answers)) for answers in data]
