"""Which of the request's own labels fits a text, by a model that knows what follows from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from handlers import explanations
from handlers.errors import PredictionException
from handlers.explanations import Question
from handlers.tasks.base import FLAG, MOST_EXPLAINED, TEXT, TEXTS, Example, TextTask, floats, listed, number

_MOST = 256  # labels of a request: each is a row of the batch


class ZeroShotClassification(TextTask):
    """``{"sequence", "labels", "scores"}``, the likeliest of ``candidate_labels`` first.

    Each label, put into ``hypothesis_template``, is a row of the one batch. The scores add up to one, unless
    ``multi_label`` asks for each label by itself.
    """

    auto = "AutoModelForSequenceClassification"
    parameters = {"candidate_labels": TEXTS, "hypothesis_template": TEXT, "multi_label": FLAG}

    def read(self, row: Any) -> Example:
        example = super().read(row)
        labels = example.parameters.get("candidate_labels")
        if not labels or len(labels) > _MOST:
            raise PredictionException(f"Send from 1 to {_MOST} candidate_labels among the parameters.", 400)
        return example

    def checked(self, parameters: Any) -> dict[str, Any]:
        known = super().checked(parameters)
        template = known.get("hypothesis_template", "{}")
        try:
            fits = template.format("x") != template
        except (IndexError, KeyError, ValueError, AttributeError):
            fits = False
        if not fits:
            raise PredictionException(f"hypothesis_template needs {{}} for the label, and is {template!r:.100}.", 400)
        return known

    def encode(self, examples: Sequence[Example]) -> Any:
        return super().encode(
            [_supposed(example, label) for example in examples for label in example.parameters["candidate_labels"]]
        )

    def tokenize(self, texts: Any, pairs: Any = None, **how: Any) -> Any:
        """Only the text gives way to the limit: the label is the question."""
        truncation = "only_first" if self.limit is not None else False
        return self.tokenizer(texts, pairs, truncation=truncation, max_length=self.limit, **how)

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What speaks for a label: an attribution for each token of the text, for the logit that the label follows.

        The label is the likeliest one, or ``target``: one of ``candidate_labels``, its number, or with ``all`` a list
        of the likeliest 16. The hypothesis stays as it is.
        """
        labels, target = example.parameters["candidate_labels"], question.target
        place = number(target)
        if target in labels:
            chosen = [target]
        elif target in (None, "all"):
            encoded = self.encode([example])
            with torch.inference_mode():
                [answer] = self.answers(self.forward(model, encoded, model.device), encoded, [example])
            chosen = answer["labels"][: 1 if target is None else MOST_EXPLAINED]
        elif place is not None and 0 <= place < len(labels):
            chosen = [labels[place]]
        else:
            raise PredictionException(
                f"The target {target!r:.100} is no candidate label. It is one of them, its number, or all; there are "
                f"{listed(labels)}.",
                400,
            )
        entails = _entailment(self.config.label2id) % self.config.num_labels

        def explained(label: str) -> dict[str, Any]:
            encoded = super(ZeroShotClassification, self).encode([_supposed(example, label)])
            found = explanations.of_encoded(
                model, self.tokenizer, encoded, self.words(encoded), question.about(entails)
            )
            return {"target": label, **found}

        found = [explained(label) for label in chosen]
        return found if target == "all" and target not in labels else found[0]

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        entails = _entailment(self.config.label2id)
        contradicts = -1 if entails == 0 else 0
        logits = floats(output.logits)
        answers, begin = [], 0
        for example in examples:
            labels = example.parameters["candidate_labels"]
            own = logits[begin : begin + len(labels)]
            begin += len(labels)
            if example.parameters.get("multi_label") or len(labels) == 1:
                scores = own[:, [contradicts, entails]].softmax(-1)[:, 1]
            else:
                scores = own[:, entails].softmax(0)
            ranked = scores.argsort(descending=True).tolist()
            answers.append(
                {
                    "sequence": example.value,
                    "labels": [labels[index] for index in ranked],
                    "scores": [float(scores[index]) for index in ranked],
                }
            )
        return answers


def _supposed(example: Example, label: str) -> Example:
    """A text, and the hypothesis that it is what the label says."""
    template = example.parameters.get("hypothesis_template", "This example is {}.")
    return example._replace(pair=template.format(label))


def _entailment(label2id: Mapping[str, int]) -> int:
    """The output that says that one text follows from another; the last where none is called so."""
    return next((index for label, index in label2id.items() if label.lower().startswith("entail")), -1)
