from handlers.base import BaseHandler


class Reader(BaseHandler):
    """64 pixels as a JSON list in; the three likeliest digits and their probabilities out."""

    def postprocess(self, data):
        best = data.softmax(dim=1).topk(3)
        return [
            {str(digit): probability for digit, probability in zip(digits, probabilities)}
            for digits, probabilities in zip(best.indices.tolist(), best.values.tolist())
        ]
