"""One label, or the likeliest few, of a text or an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers import explanations
from handlers.explanations import Question
from handlers.tasks.base import COUNT, Example, ImageTask, TextTask, floats, one_of, output_number

_FUNCTIONS = one_of("softmax", "sigmoid", "none")


class TextClassification(TextTask):
    """``{"label", "score"}``, or a list of ``top_k`` of them, the likeliest first."""

    auto = "AutoModelForSequenceClassification"
    pairs = True
    parameters = {"top_k": COUNT, "function_to_apply": _FUNCTIONS}
    target = 0

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """An attribution for each token of the text, and of its pair."""
        question = question.about(output_number(question.target, self.config.label2id))
        return explanations.of_text(model, self.tokenizer, example.value, question, example.pair, self.limit)

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        return [
            ranked[0] if "top_k" not in example.parameters else ranked
            for example, ranked in zip(examples, _ranked(output.logits, self.config, examples, 1))
        ]


class ImageClassification(ImageTask):
    """The ``top_k`` (5) likeliest ``{"label", "score"}``."""

    auto = "AutoModelForImageClassification"
    parameters = {"top_k": COUNT, "function_to_apply": _FUNCTIONS}

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        return list(_ranked(output.logits, self.config, examples, 5))


def _ranked(logits: torch.Tensor, config: Any, examples: Sequence[Example], usual: int) -> list[list[dict[str, Any]]]:
    """For each row as many labels as it asks for, ``usual`` where it does not say."""
    scores = floats(logits)
    own = {"multi_label_classification": "sigmoid", "regression": "none"}.get(config.problem_type or "")
    own = own or ("sigmoid" if config.num_labels == 1 else "softmax")
    ranked = []
    for row, example in zip(scores, examples):
        function = example.parameters.get("function_to_apply", own)
        if function != "none":
            row = row.softmax(-1) if function == "softmax" else row.sigmoid()
        best = row.topk(min(example.parameters.get("top_k", usual), len(row)))
        pairs = zip(best.indices.tolist(), best.values.tolist())
        ranked.append([{"label": config.id2label[index], "score": score} for index, score in pairs])
    return ranked
