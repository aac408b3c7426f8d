"""Entities in a text, with their places."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from handlers.tasks.base import TEXTS, Example, TextTask, floats, one_of


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

    def _answer(self, outputs: dict[str, Any], example: Example) -> list[dict[str, Any]]:
        from transformers.pipelines import AggregationStrategy

        strategy = AggregationStrategy(example.parameters.get("aggregation_strategy", "simple"))
        ignored = example.parameters.get("ignore_labels")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which tokenizer knows words is nothing a request can change
            found = self._entities.postprocess([outputs], strategy, ignored)
        return [{**entity, "score": float(entity["score"])} for entity in found]
