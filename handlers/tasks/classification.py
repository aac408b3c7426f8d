"""Classification of texts and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import (
    COUNT,
    ImageTask,
    TaskInput,
    one_of,
    output_index,
    to_cpu_float32,
)
from handlers.tasks.encoder import EncoderTask

_FUNCTIONS = one_of("softmax", "sigmoid", "none")


class TextClassification(EncoderTask):
    """A text classifier that answers ``{"label", "score"}``, or the ``top_k`` best of them as a list.

    With ``tokens: true``, each has the number of ``tokens`` that the model read. Cross-encoders have one
    label, whose score is the output ``score``; ``labels`` is the list of all labels.
    """

    auto_class = "AutoModelForSequenceClassification"
    accepts_pairs = True
    model_outputs = ("label", "labels", "score")
    parameters = {**EncoderTask.parameters, "top_k": COUNT, "function_to_apply": _FUNCTIONS}
    default_target = 0

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token of the text and of its pair."""
        options = options.for_target(output_index(options.target, self.config.label2id))
        return attributions.attribute_text(
            model, self.tokenizer, example.value, options, example.pair, self.max_length
        )

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        answers: list[Any] = []
        examples = [self._request_labels(example) for example in examples]
        for index, ranked in enumerate(_rank_labels(output.logits, self.config, examples, 1)):
            parameters = examples[index].parameters
            if parameters.get("tokens"):
                count = int(encoded["attention_mask"][index].sum())
                ranked = [{**answer, "tokens": count} for answer in ranked]
            answers.append(ranked if "top_k" in parameters else ranked[0])
        return answers

    def parse_value(self, value: Any, parameters: Mapping[str, Any]) -> tuple[Any, str | None]:
        if parameters.get("output_value") == "score" and self.config.num_labels != 1:
            raise PredictionException(
                f"The score is of a cross-encoder, which has one label; this model has "
                f"{self.config.num_labels}.",
                400,
            )
        return super().parse_value(value, parameters)

    def describe(self) -> dict[str, Any]:
        labels = {str(index): name for index, name in self.config.id2label.items()}
        return {**super().describe(), "labels": labels}

    def _request_labels(self, example: TaskInput) -> TaskInput:
        """Return an example with the ``top_k`` of its output."""
        if self.get_output(example) != "labels":
            return example
        return example._replace(parameters={"top_k": self.config.num_labels, **example.parameters})


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
    default_function = functions.get(config.problem_type or "") or _cross_encoder_function(config)
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


def _cross_encoder_function(config: Any) -> str | None:
    """Return the function that sentence-transformers has stored with its CrossEncoder, if any."""
    settings = getattr(config, "sentence_transformers", None) or {}
    name = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    functions = {"Identity": "none", "Sigmoid": "sigmoid"}
    return functions.get(str(name).rpartition(".")[2])
