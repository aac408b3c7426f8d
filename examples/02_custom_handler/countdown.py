"""A streamed response: each intermediate response is sent at once; the return value is the last chunk."""

import time

from handlers.torchserve_compat.intermediate import send_intermediate_predict_response


class Countdown:
    def handle(self, data, context):
        for idx in range(len(data)):
            context.set_response_content_type(idx, "text/plain")
        for second in (3, 2, 1):
            values = [f"{second}\n"] * len(data)
            send_intermediate_predict_response(values, context.request_ids, "counting", 200, context)
            time.sleep(0.5)
        return ["lift-off\n"] * len(data)
