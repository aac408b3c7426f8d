"""A streamed reply: every intermediate response leaves at once, what is returned is the last piece."""

import time

from handlers.intermediate import send_intermediate_predict_response


class Countdown:
    def handle(self, data, context):
        for idx in range(len(data)):
            context.set_response_content_type(idx, "text/plain")
        for second in (3, 2, 1):
            values = [f"{second}\n"] * len(data)
            send_intermediate_predict_response(values, context.request_ids, "counting", 200, context)
            time.sleep(0.5)
        return ["lift-off\n"] * len(data)
