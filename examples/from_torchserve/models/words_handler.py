"""Count words: a function as a handler, with its own metric, header and status."""

from ts.metrics.dimension import Dimension


def handle(data, context):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        text = row.get("text") or row.get("data") or row.get("body") or ""
        if isinstance(text, (bytes, bytearray)):
            text = text.decode()
        if isinstance(text, dict):
            text = text["text"]
        words = text.split()
        context.metrics.add_counter("WordsSeen", len(words), index, [Dimension("Language", "any")])
        context.set_response_header(index, "X-Words", str(len(words)))
        if not words:
            context.set_response_status(422, "No words", index)
        if words == ["fail"]:
            raise ValueError("asked to fail")
        answers.append({"words": len(words), "longest": max(words, key=len, default="")})
    return answers
