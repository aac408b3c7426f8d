from torchrelay import BaseHandler


class Reader(BaseHandler):
    """A handler that returns the three most probable digits of a JSON list of 64 pixels."""

    def postprocess(self, data):
        best = data.softmax(dim=1).topk(3)
        return [
            {str(digit): probability for digit, probability in zip(digits, probabilities)}
            for digits, probabilities in zip(best.indices.tolist(), best.values.tolist())
        ]
