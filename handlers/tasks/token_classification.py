"""Entities in a text, with their places."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers import explanations
from handlers.errors import PredictionException
from handlers.explanations import Question
from handlers.tasks.base import MOST_EXPLAINED, TEXTS, Example, TextTask, fields, floats, listed, number, one_of


class Places(NamedTuple):
    """The model's input, and where in its texts each token stands."""

    inputs: Any
    places: dict[str, Any]


class TokenClassification(TextTask):
    """``[{"entity_group", "score", "word", "start", "end"}]``: ``start`` and ``end`` are places in the text.

    Tokens are put together as ``aggregation_strategy`` says (simple); with none each is told by itself.
    What is put together, and how, is transformers' own.
    """

    auto = "AutoModelForTokenClassification"
    parameters = {
        "aggregation_strategy": one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": TEXTS,
    }

    def fit(self, model: Any) -> None:
        super().fit(model)
        from transformers import TokenClassificationPipeline

        self._entities = TokenClassificationPipeline(model=model, tokenizer=self.tokenizer, device=model.device)

    def encode(self, examples: Sequence[Example]) -> Any:
        encoded = self.tokenize(
            [example.value for example in examples],
            padding=True,
            return_tensors="pt",
            return_special_tokens_mask=True,
            return_offsets_mapping=self.tokenizer.is_fast,
        )
        places = {name: encoded.pop(name, None) for name in ("special_tokens_mask", "offset_mapping")}
        return Places(self.kept(encoded), places)

    def forward(self, model: Any, encoded: Any, device: Any) -> Any:
        return super().forward(model, encoded.inputs, device)

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        logits, ids, places = floats(output.logits), encoded.inputs["input_ids"].cpu(), encoded.places
        return [
            self._answer(
                {
                    "logits": logits[row : row + 1],
                    "input_ids": ids[row : row + 1],
                    "sentence": example.value,
                    **{name: None if place is None else place[row : row + 1] for name, place in places.items()},
                },
                example,
            )
            for row, example in enumerate(examples)
        ]

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What made a label: an attribution for each token, and as ``target`` what was labelled.

        That is the surest entity; or one by its number in the answer, the surest of a label, with ``all`` a list of
        the surest 16; or the label of a token, ``{"token": 3, "label": "B-PER"}``. The score of an entity is the mean
        of its tokens' logits, each for the likeliest of the entity's labels.
        """
        encoded = self.encode([example])
        with torch.inference_mode():
            output = self.forward(model, encoded, model.device)
        words = encoded.places["special_tokens_mask"][0] == 0
        labelled = self._labelled(output, encoded, example, question.target, words)

        def explained(about: Mapping[str, Any], tokens: list[int], labels: list[int]) -> dict[str, Any]:
            found = explanations.of_encoded(
                model,
                self.tokenizer,
                encoded.inputs,
                words,
                question.about(0),
                lambda output: output.logits[:, tokens, labels].mean(-1),
            )
            return {"target": about, **found}

        found = [explained(*one) for one in labelled]
        return found if question.target == "all" else found[0]

    def _labelled(
        self, output: Any, encoded: Any, example: Example, target: Any, words: torch.Tensor
    ) -> list[tuple[Mapping[str, Any], list[int], list[int]]]:
        """What a target names, as the answer has it, with its tokens and a label for each."""
        logits = floats(output.logits)[0]
        if (place := fields(target)) is not None:
            token, label = number(place.get("token")), place.get("label")
            inside = words.nonzero().flatten().tolist()
            if token not in inside or not set(place) <= {"token", "label"}:
                what = f"token is one of those that are no frame, {inside[0]} to {inside[-1]}" if inside else "no word"
                raise PredictionException(f'The target {dict(place)!r:.200} is no {{"token", "label"}}; {what}.', 400)
            labels = self.config.label2id
            index = labels.get(label, number(label)) if isinstance(label, str) else number(label)
            index = int(logits[token].argmax()) if label is None else index
            if index not in self.config.id2label:
                raise PredictionException(
                    f"There is no label {label!r:.100}; there are {listed(self.config.id2label.values())}.", 400
                )
            return [({"token": token, "label": self.config.id2label[index]}, [token], [index])]
        if not self.tokenizer.is_fast:  # it does not know where an entity's words stand
            example = example._replace(parameters={**example.parameters, "aggregation_strategy": "none"})
        [entities] = self.answers(output, encoded, [example])
        chosen = self._chosen(entities, target)
        return [(entity, *self._of_entity(entity, encoded, logits)) for entity in chosen]

    def _chosen(self, entities: list[dict[str, Any]], target: Any) -> list[dict[str, Any]]:
        surest = sorted(entities, key=lambda entity: -entity["score"])
        if target == "all" and entities:
            return [entity for entity in entities if entity in surest[:MOST_EXPLAINED]]
        if target is None:
            named = surest
        elif (place := number(target)) is not None:
            named = entities[place : place + 1] if place >= 0 else []
        else:
            named = [entity for entity in surest if target == _label(entity)]
        if not named:
            there = listed(f"{i}: {_label(entity)} {entity['word']!r}" for i, entity in enumerate(entities))
            raise PredictionException(
                f"There is no such entity to explain as the target says ({target!r:.100}). It is an entity's number or "
                f'label, all, or {{"token": 1, "label": "{self.config.id2label[0]}"}}. The text has: {there}.',
                400,
            )
        return named[:1]

    def _of_entity(self, entity: dict[str, Any], encoded: Any, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """The entity's tokens, and of its labels each one's likeliest."""
        if "index" in entity:
            tokens = [entity["index"]]
        else:
            places = encoded.places["offset_mapping"][0].tolist()
            tokens = [i for i, (start, end) in enumerate(places) if start < entity["end"] and end > entity["start"]]
        fitting = [index for index, name in self.config.id2label.items() if _label(entity) in (name, _group(name))]
        return tokens, [fitting[int(logits[token, fitting].argmax())] for token in tokens]

    def _answer(self, outputs: dict[str, Any], example: Example) -> list[dict[str, Any]]:
        from transformers.pipelines import AggregationStrategy

        strategy = AggregationStrategy(example.parameters.get("aggregation_strategy", "simple"))
        ignored = example.parameters.get("ignore_labels")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which tokenizer knows words is nothing a request can change
            found = self._entities.postprocess([outputs], strategy, ignored)
        return [{**entity, "score": float(entity["score"])} for entity in found]


def _label(entity: Mapping[str, Any]) -> str:
    return entity.get("entity_group") or entity["entity"]


def _group(label: str) -> str:
    """``PER`` of ``B-PER`` and ``I-PER``."""
    return label[2:] if label.startswith(("B-", "I-")) else label
