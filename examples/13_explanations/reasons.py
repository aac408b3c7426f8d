import torch
from handler import DigitClassifier

from handlers import explanations


class Reasons(DigitClassifier):
    """Reads a digit, and says which of its pixels speak for it: with the scores that the attributions lie between."""

    def get_insights(self, tensor_data: torch.Tensor, raw_data: object, target: int = 0) -> list[dict]:
        question = self.question.of(self.asked, target)
        found = explanations.attributions(self.model, tensor_data, question)
        scores = explanations.scores(self.model, tensor_data, target)
        [empty] = explanations.scores(self.model, torch.zeros_like(tensor_data[:1]), target)
        return [
            {"pixels": image[0].tolist(), "attributions": parts[0].tolist(), "score": score, "score_of_empty": empty}
            for image, parts, score in zip(tensor_data, found, scores)
        ]
