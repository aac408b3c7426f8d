"""Zero-shot classification into the request's labels, by a natural language inference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import (
    FLAG,
    MAX_EXPLANATIONS,
    TEXT,
    TEXTS,
    TaskInput,
    TextTask,
    join_names,
    parse_integer,
    to_cpu_float32,
)

_MAX_LABELS = 256  # of a request: each is a row of the batch
_MAX_TEMPLATE = 1000  # characters, which each label repeats


class ZeroShotClassification(TextTask):
    """A task that answers ``{"sequence", "labels", "scores"}``, the best of ``candidate_labels`` first.

    Each label, inserted into ``hypothesis_template``, is a row of one batch. The scores sum to one, unless
    ``multi_label`` scores each label independently.
    """

    auto_class = "AutoModelForSequenceClassification"
    parameters = {"candidate_labels": TEXTS, "hypothesis_template": TEXT, "multi_label": FLAG}

    def parse(self, row: Any) -> TaskInput:
        example = super().parse(row)
        labels = example.parameters.get("candidate_labels")
        if not labels or len(labels) > _MAX_LABELS:
            raise PredictionException(
                f"Send from 1 to {_MAX_LABELS} candidate_labels among the parameters.", 400
            )
        return example

    def validate_parameters(self, parameters: Any) -> dict[str, Any]:
        validated = super().validate_parameters(parameters)
        template = validated.get("hypothesis_template", "{}")
        if len(template) > _MAX_TEMPLATE or not _has_placeholder(template):
            raise PredictionException(
                f"hypothesis_template has {{}} once, for the label, and at most {_MAX_TEMPLATE} characters; "
                f"it is {template!r:.100}.",
                400,
            )
        return validated

    def encode(self, examples: Sequence[TaskInput]) -> Any:
        return super().encode(
            [
                _with_hypothesis(example, label)
                for example in examples
                for label in example.parameters["candidate_labels"]
            ]
        )

    def tokenize(self, texts: Any, pairs: Any = None, **options: Any) -> Any:
        """Tokenize with truncation of the text only: the label must stay whole."""
        truncation = "only_first" if self.max_length is not None else False
        return self.tokenizer(texts, pairs, truncation=truncation, max_length=self.max_length, **options)

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token of the text to the entailment logit of a label.

        ``target`` is one of ``candidate_labels``, its number, or ``all`` for a list of the 16 best; the
        default is the best label. The hypothesis is not perturbed.
        """
        labels, target = example.parameters["candidate_labels"], options.target
        index = parse_integer(target)
        if target in labels:
            selected = [target]
        elif target in (None, "all"):
            encoded = self.encode([example])
            with torch.inference_mode():
                [answer] = self.postprocess(self.forward(model, encoded, model.device), encoded, [example])
            selected = answer["labels"][: 1 if target is None else MAX_EXPLANATIONS]
        elif index is not None and 0 <= index < len(labels):
            selected = [labels[index]]
        else:
            raise PredictionException(
                f"The target {target!r:.100} is no candidate label. It is one of them, its number, or all; "
                f"there are {join_names(labels)}.",
                400,
            )
        entailment = _entailment_index(self.config.label2id) % self.config.num_labels

        def explain_label(label: str) -> dict[str, Any]:
            encoded = super(ZeroShotClassification, self).encode([_with_hypothesis(example, label)])
            explanation = attributions.attribute_encoded(
                model, self.tokenizer, encoded, self.text_mask(encoded), options.for_target(entailment)
            )
            return {"target": label, **explanation}

        explanations = [explain_label(label) for label in selected]
        return explanations if target == "all" and target not in labels else explanations[0]

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        entailment = _entailment_index(self.config.label2id)
        contradiction = -1 if entailment == 0 else 0
        logits = to_cpu_float32(output.logits)
        answers, start = [], 0
        for example in examples:
            labels = example.parameters["candidate_labels"]
            rows = logits[start : start + len(labels)]
            start += len(labels)
            if example.parameters.get("multi_label") or len(labels) == 1:
                scores = rows[:, [contradiction, entailment]].softmax(-1)[:, 1]
            else:
                scores = rows[:, entailment].softmax(0)
            ranked = scores.argsort(descending=True).tolist()
            answers.append(
                {
                    "sequence": example.value,
                    "labels": [labels[index] for index in ranked],
                    "scores": [float(scores[index]) for index in ranked],
                }
            )
        return answers


def _has_placeholder(template: str) -> bool:
    """Return whether a template has ``{}`` once, and nothing else that ``format`` replaces.

    A width, as of ``{:>9999999999}``, would be memory that a client chooses, and a field an attribute.
    """
    try:
        found = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        return False
    return len(found) == 1 and found[0] in (("", "", None), ("0", "", None))


def _with_hypothesis(example: TaskInput, label: str) -> TaskInput:
    """Return the text with the label's hypothesis as its pair."""
    template = example.parameters.get("hypothesis_template", "This example is {}.")
    return example._replace(pair=template.format(label))


def _entailment_index(label2id: Mapping[str, int]) -> int:
    """Return the index of the entailment output; the last without one of that name."""
    return next((index for label, index in label2id.items() if label.lower().startswith("entail")), -1)
