"""A handler that streams the moment at which each chunk was made: lines, or OpenAI's events where the path
asks.
"""

import asyncio
import json
import time


class Chunks:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        requested = data[0]["body"]
        if not isinstance(requested, dict):  # by gRPC they are bytes
            requested = json.loads(requested)
        line, end = "{}\n", ""
        if context.get_request_header(0, "url_path"):
            line, end = 'data: {{"sent": {}}}\n\n', "data: [DONE]\n\n"
            context.set_response_content_type(0, "text/event-stream")
        for _ in range(requested["count"]):
            await asyncio.sleep(requested["pause"])
            context.emit(0, line.format(time.time_ns()))
        return [end]
