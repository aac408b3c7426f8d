"""The echo with two metrics of its own for each request."""


def handle(data, context):
    if data is None:
        return None
    for index, row in enumerate(data):
        body = row.get("body") or row.get("data")
        context.metrics.add_counter("EchoedRequests", 1, index)
        context.metrics.add_size("EchoedText", len(body["text"]), index, "B")
    return [row.get("body") or row.get("data") for row in data]
