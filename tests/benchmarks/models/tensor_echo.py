"""Answers with the tensors that it was sent: what a protocol costs around a model that costs nothing."""


def handle(data, context):
    return None if data is None else [dict(row) for row in data]
