"""A class as a handler; a PredictionException in place of an answer fails only that row."""

import torch
from torchrelay import PredictionException


class SquareRoot:
    def initialize(self, context):
        gpu = context.system_properties["gpu_id"]
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"

    def handle(self, data, context):
        answers = [self.validate(row["body"]) for row in data]
        valid = [index for index, answer in enumerate(answers) if isinstance(answer, float)]
        numbers = torch.tensor([answers[index] for index in valid], dtype=torch.float64, device=self.device)
        roots = numbers.sqrt()  # one operation for the batch
        for index, root in zip(valid, roots.tolist(), strict=True):
            answers[index] = {"root": root}
        return answers

    def validate(self, body):
        number = body.get("number") if isinstance(body, dict) else None
        if not isinstance(number, (int, float)):
            return PredictionException('send JSON such as {"number": 9}', 400)
        if number < 0:
            return PredictionException(f"{number} has no real square root", 422)
        return float(number)
