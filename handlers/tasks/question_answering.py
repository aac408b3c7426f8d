"""The part of a text that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.tasks.base import COUNT, Example, TextTask, floats

_STRIDE = 128  # tokens that a part of a long context has in common with the next


class Windows(NamedTuple):
    """Every context in parts that the model can read, each behind its question."""

    inputs: Any
    row: list[int]  # whose part it is
    inside: torch.Tensor  # windows x tokens: which tokens are the context's
    offsets: list[list[tuple[int, int]]]  # where in the context each stands


class QuestionAnswering(TextTask):
    """``{"score", "start", "end", "answer"}``: the likeliest part of ``context``.

    It has at most ``max_answer_len`` (15) tokens. A context beyond the limit is read in parts that overlap; all parts
    of all rows are one batch.
    """

    auto = "AutoModelForQuestionAnswering"
    fields = ("question", "context")
    pairs = True
    parameters = {"max_answer_len": COUNT}

    def fit(self, model: Any) -> None:
        super().fit(model)
        if not self.tokenizer.is_fast:
            raise HandlerLoadError(
                f"{self.directory}: question-answering needs a tokenizer.json, which knows where in the text each "
                "token stands; save the fast tokenizer"
            )

    def inputs(self, value: Any) -> tuple[Any, str | None]:
        question, context = super().inputs(value if isinstance(value, Mapping) else {})
        if not context or not question.strip() or not context.strip():
            raise PredictionException('Send JSON with "question" and "context", both texts.', 400)
        if self.limit is not None and len(self.tokenizer(question).input_ids) > self.limit // 2:
            raise PredictionException(f"The question is longer than half of the model's {self.limit} tokens.", 400)
        return question, context

    def encode(self, examples: Sequence[Example]) -> Windows:
        how: dict[str, Any] = {"truncation": False}
        if self.limit is not None:
            stride = min(_STRIDE, self.limit // 4)  # less than what a question leaves of the limit
            how = {"truncation": "only_second", "max_length": self.limit, "stride": stride}
            how["return_overflowing_tokens"] = True
        encoded = self.tokenizer(
            [example.value for example in examples],
            [example.pair for example in examples],
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
            **how,
        )
        count = len(encoded["input_ids"])
        inside = torch.tensor([[part == 1 for part in encoded.sequence_ids(index)] for index in range(count)])
        row = encoded.pop("overflow_to_sample_mapping", torch.arange(count)).tolist()
        offsets = encoded.pop("offset_mapping").tolist()
        return Windows(self.kept(encoded), row, inside, offsets)

    def forward(self, model: Any, encoded: Windows, device: Any) -> Any:
        return super().forward(model, encoded.inputs, device)

    def answers(self, output: Any, encoded: Windows, examples: Sequence[Example]) -> list[Any]:
        starts = floats(output.start_logits).masked_fill(~encoded.inside, -torch.inf).softmax(-1)
        ends = floats(output.end_logits).masked_fill(~encoded.inside, -torch.inf).softmax(-1)
        best: list[dict[str, Any]] = [{"score": -1.0}] * len(examples)
        for window, row in enumerate(encoded.row):
            longest = examples[row].parameters.get("max_answer_len", 15)
            together = torch.outer(starts[window], ends[window]).triu().tril(longest - 1)
            score, place = together.flatten().max(0)
            if float(score) > best[row]["score"]:
                first, last = divmod(int(place), len(together))
                start, end = encoded.offsets[window][first][0], encoded.offsets[window][last][1]
                answer = (examples[row].pair or "")[start:end]
                best[row] = {"score": float(score), "start": start, "end": end, "answer": answer}
        return best
