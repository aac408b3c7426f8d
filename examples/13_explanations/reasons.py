import torch
from handler import DigitClassifier

from handlers.explain import attributions


class Reasons(DigitClassifier):
    """A digit classifier whose explanations also have the pixels and the scores that attributions sum to."""

    def get_insights(self, tensor_data: torch.Tensor, raw_data: object, target: int = 0) -> list[dict]:
        options = self.explanation_options.for_row(self.explained_row, target)
        values = attributions.attribute(self.model, tensor_data, options)
        scores = attributions.output_scores(self.model, tensor_data, target)
        [empty] = attributions.output_scores(self.model, torch.zeros_like(tensor_data[:1]), target)
        return [
            {
                "pixels": image[0].tolist(),
                "attributions": parts[0].tolist(),
                "score": score,
                "score_of_empty": empty,
            }
            for image, parts, score in zip(tensor_data, values, scores)
        ]
