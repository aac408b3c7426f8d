"""Token classification: the entities of a text and their positions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import (
    MAX_EXPLANATIONS,
    TEXTS,
    TaskInput,
    TextTask,
    join_names,
    one_of,
    parse_integer,
    parse_object,
    to_cpu_float32,
)


class TokenOffsets(NamedTuple):
    """The model's input, the special tokens, and the position of each token in its text."""

    inputs: Any
    offsets: dict[str, Any]


class TokenClassification(TextTask):
    """A task that answers ``[{"entity_group", "score", "word", "start", "end"}]`` with positions in the text.

    transformers aggregates the tokens by ``aggregation_strategy`` (simple); with ``none`` each token is an
    entity.
    """

    auto_class = "AutoModelForTokenClassification"
    parameters = {
        "aggregation_strategy": one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": TEXTS,
    }

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        from transformers import TokenClassificationPipeline

        self._pipeline = TokenClassificationPipeline(
            model=model, tokenizer=self.tokenizer, device=model.device
        )

    def encode(self, examples: Sequence[TaskInput]) -> Any:
        encoded = self.tokenize(
            [example.value for example in examples],
            padding=True,
            return_tensors="pt",
            return_special_tokens_mask=True,
            return_offsets_mapping=self.tokenizer.is_fast,
        )
        offsets = {name: encoded.pop(name, None) for name in ("special_tokens_mask", "offset_mapping")}
        return TokenOffsets(self.drop_unsupported(encoded), offsets)

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        return super().forward(model, encoded.inputs, device)

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        logits, ids = to_cpu_float32(output.logits), encoded.inputs["input_ids"].cpu()
        return [
            self._find_entities(
                {
                    "logits": logits[row : row + 1],
                    "input_ids": ids[row : row + 1],
                    "sentence": example.value,
                    **{
                        name: None if values is None else values[row : row + 1]
                        for name, values in encoded.offsets.items()
                    },
                },
                example,
            )
            for row, example in enumerate(examples)
        ]

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token to a label, with the labelled entity as ``target``.

        The request's ``target`` selects an entity by its number in the answer, the most probable one of a
        label, or with ``all`` a list of the 16 most probable. ``{"token": 3, "label": "B-PER"}`` selects a
        token's label. The default is the most probable entity. An entity's score is the mean of its tokens'
        logits, each for the most probable of the entity's labels.
        """
        encoded = self.encode([example])
        with torch.inference_mode():
            output = self.forward(model, encoded, model.device)
        text_mask = encoded.offsets["special_tokens_mask"][0] == 0

        def explain_labels(
            selected: Mapping[str, Any], tokens: list[int], labels: list[int]
        ) -> dict[str, Any]:
            explanation = attributions.attribute_encoded(
                model,
                self.tokenizer,
                encoded.inputs,
                text_mask,
                options.for_target(0),
                lambda output: output.logits[:, tokens, labels].mean(-1),
            )
            return {"target": selected, **explanation}

        selections = self._select_targets(output, encoded, example, options.target, text_mask)
        explanations = [explain_labels(*selection) for selection in selections]
        return explanations if options.target == "all" else explanations[0]

    def _select_targets(
        self, output: Any, encoded: Any, example: TaskInput, target: Any, text_mask: torch.Tensor
    ) -> list[tuple[Mapping[str, Any], list[int], list[int]]]:
        """Return the selected entities or token labels, each with its tokens and a label per token."""
        logits = to_cpu_float32(output.logits)[0]
        if (selector := parse_object(target)) is not None:
            return [self._select_token(selector, logits, text_mask)]
        if not self.tokenizer.is_fast:  # it does not know the positions of an entity's words
            example = example._replace(parameters={**example.parameters, "aggregation_strategy": "none"})
        [entities] = self.postprocess(output, encoded, [example])
        selected = self._select_entities(entities, target)
        return [(entity, *self._entity_tokens(entity, encoded, logits)) for entity in selected]

    def _select_token(
        self, selector: Mapping[str, Any], logits: torch.Tensor, text_mask: torch.Tensor
    ) -> tuple[Mapping[str, Any], list[int], list[int]]:
        token, label = parse_integer(selector.get("token")), selector.get("label")
        allowed = text_mask.nonzero().flatten().tolist()
        if token is None or token not in allowed or not set(selector) <= {"token", "label"}:
            reason = "no word"
            if allowed:
                reason = f"token is one of those that are no frame, {allowed[0]} to {allowed[-1]}"
            raise PredictionException(
                f'The target {dict(selector)!r:.200} is no {{"token", "label"}}; {reason}.', 400
            )
        index: int | None = int(logits[token].argmax())
        if label is not None:
            index = self.config.label2id.get(label) if isinstance(label, str) else None
            index = parse_integer(label) if index is None else index
        if index is None or index not in self.config.id2label:
            raise PredictionException(
                f"There is no label {label!r:.100}; there are {join_names(self.config.id2label.values())}.",
                400,
            )
        return {"token": token, "label": self.config.id2label[index]}, [token], [index]

    def _select_entities(self, entities: list[dict[str, Any]], target: Any) -> list[dict[str, Any]]:
        by_score = sorted(entities, key=lambda entity: -entity["score"])
        if target == "all" and entities:
            return [entity for entity in entities if entity in by_score[:MAX_EXPLANATIONS]]
        if target is None:
            matches = by_score
        elif (index := parse_integer(target)) is not None:
            matches = entities[index : index + 1] if index >= 0 else []
        else:
            matches = [entity for entity in by_score if target == _label(entity)]
        if not matches:
            names = join_names(
                f"{i}: {_label(entity)} {entity['word']!r}" for i, entity in enumerate(entities)
            )
            raise PredictionException(
                f"There is no entity for the target {target!r:.100}. It is an "
                "entity's number or label, all, or "
                f'{{"token": 1, "label": "{self.config.id2label[0]}"}}. The text has: {names}.',
                400,
            )
        return matches[:1]

    def _entity_tokens(
        self, entity: dict[str, Any], encoded: Any, logits: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """Return the entity's tokens, and for each the most probable of the entity's labels."""
        if "index" in entity:
            tokens = [entity["index"]]
        else:
            offsets = encoded.offsets["offset_mapping"][0].tolist()
            tokens = [
                i for i, (start, end) in enumerate(offsets) if start < entity["end"] and end > entity["start"]
            ]
        labels = [
            index
            for index, name in self.config.id2label.items()
            if _label(entity) in (name, _strip_prefix(name))
        ]
        return tokens, [labels[int(logits[token, labels].argmax())] for token in tokens]

    def _find_entities(self, outputs: dict[str, Any], example: TaskInput) -> list[dict[str, Any]]:
        from transformers.pipelines import AggregationStrategy

        strategy = AggregationStrategy(example.parameters.get("aggregation_strategy", "simple"))
        ignored = example.parameters.get("ignore_labels")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a request cannot change whether the tokenizer knows words
            entities = self._pipeline.postprocess([outputs], strategy, ignored)
        return [{**entity, "score": float(entity["score"])} for entity in entities]


def _label(entity: Mapping[str, Any]) -> str:
    return entity.get("entity_group") or entity["entity"]


def _strip_prefix(label: str) -> str:
    """Return ``PER`` for ``B-PER`` and ``I-PER``."""
    return label[2:] if label.startswith(("B-", "I-")) else label
