from handlers.base import BaseHandler


class DigitHandler(BaseHandler):
    """64 pixels as a JSON list in, the digit out. A batch is one tensor, so 16 rows cost little more than one."""

    def postprocess(self, data):
        return [{"digit": digit} for digit in data.argmax(dim=1).tolist()]
