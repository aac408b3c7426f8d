"""Classification of texts and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import COUNT, ImageTask, TaskInput, TextTask, one_of, output_index, to_cpu_float32

_FUNCTIONS = one_of("softmax", "sigmoid", "none")


class TextClassification(TextTask):
    """A text classifier that answers ``{"label", "score"}``, or the ``top_k`` best of them as a list."""

    auto_class = "AutoModelForSequenceClassification"
    accepts_pairs = True
    parameters = {"top_k": COUNT, "function_to_apply": _FUNCTIONS}
    default_target = 0

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token of the text and of its pair."""
        options = options.for_target(output_index(options.target, self.config.label2id))
        return attributions.attribute_text(
            model, self.tokenizer, example.value, options, example.pair, self.max_length
        )

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        return [
            ranked[0] if "top_k" not in example.parameters else ranked
            for example, ranked in zip(examples, _rank_labels(output.logits, self.config, examples, 1))
        ]


class ImageClassification(ImageTask):
    """An image classifier that answers the ``top_k`` (5) best ``{"label", "score"}``."""

    auto_class = "AutoModelForImageClassification"
    parameters = {"top_k": COUNT, "function_to_apply": _FUNCTIONS}

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        return list(_rank_labels(output.logits, self.config, examples, 5))


def _rank_labels(
    logits: torch.Tensor, config: Any, examples: Sequence[TaskInput], default_top_k: int
) -> list[list[dict[str, Any]]]:
    """Return the ``top_k`` best labels of each row."""
    scores = to_cpu_float32(logits)
    functions = {"multi_label_classification": "sigmoid", "regression": "none"}
    default_function = functions.get(config.problem_type or "")
    default_function = default_function or ("sigmoid" if config.num_labels == 1 else "softmax")
    ranked = []
    for row, example in zip(scores, examples):
        function = example.parameters.get("function_to_apply", default_function)
        if function != "none":
            row = row.softmax(-1) if function == "softmax" else row.sigmoid()
        best = row.topk(min(example.parameters.get("top_k", default_top_k), len(row)))
        pairs = zip(best.indices.tolist(), best.values.tolist())
        ranked.append([{"label": config.id2label[index], "score": score} for index, score in pairs])
    return ranked
