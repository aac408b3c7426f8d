"""Requests and handlers for tests of the runner."""

import json

from serve_app.domain.request import InferenceRequest, InputPart


def make_request(value=b"{}", content_type="application/json", **fields):
    fields.setdefault("request_id", "id")
    return InferenceRequest("m", inputs=(InputPart("body", value, content_type),), **fields)


def make_json_request(value):
    return make_request(json.dumps(value).encode())


def fail_on_chunk(index, chunk):
    raise AssertionError("nothing streams here")


ECHO = """
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""

# What `do` says happens: to the row itself, or (a list) to the whole batch.
OBEDIENT = """
from ts.utils.util import PredictionException

class Obedient:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        orders = [row["body"] for row in data]
        for order in orders:
            if order == "raise":
                raise ValueError("this row is wrong")
            if order == "say":
                raise PredictionException("not today", 418)
            if order == "exit":
                raise SystemExit(7)
            if order == "memory":
                raise MemoryError()
            if order == "cuda":
                raise RuntimeError("CUDA error: out of memory")
            if order == "device":
                raise type("OutOfMemoryError", (RuntimeError,), {})("HIP out of memory")
            if order == "dict":
                return {"not": "a list"}
            if order == "short":
                return []
        return [self.one(order, i) for i, order in enumerate(orders)]

    def one(self, order, i):
        if order == "row raise":
            try:
                raise ValueError("only this row")
            except ValueError as error:
                return error
        if order == "row say":
            return PredictionException("only you", 404)
        if order == "object":
            return object()
        if order == "dressed":
            self.context.set_response_content_type(i, "image/x")
            self.context.set_response_header(i, "X-Row", str(i))
            self.context.set_response_status(203, "Half", i)
        return order
"""
