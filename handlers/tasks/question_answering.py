"""Extractive question answering: the span of a context that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import COUNT, TaskInput, TextTask, parse_integer, parse_object, to_cpu_float32

_MAX_STRIDE = 128  # tokens that two consecutive windows of a long context share


class ContextWindows(NamedTuple):
    """The windows of all contexts, each behind its question and short enough for the model."""

    inputs: Any
    rows: list[int]  # the row of each window
    context_mask: torch.Tensor  # windows x tokens: tokens of the context
    text_mask: torch.Tensor  # windows x tokens: tokens of the question or of the context
    offsets: list[list[tuple[int, int]]]  # the position of each token in the context


class AnswerSpan(NamedTuple):
    """The best span of a context: ``first`` to ``last`` are tokens of ``window``."""

    score: float
    window: int
    first: int
    last: int


class QuestionAnswering(TextTask):
    """A task that answers ``{"score", "start", "end", "answer"}`` with the best span of ``context``.

    A span has at most ``max_answer_len`` (15) tokens. A long context is split into overlapping windows; the
    windows of all rows are one batch.
    """

    auto_class = "AutoModelForQuestionAnswering"
    fields = ("question", "context")
    accepts_pairs = True
    parameters = {"max_answer_len": COUNT}

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        if not self.tokenizer.is_fast:
            raise HandlerLoadError(
                f"{self.directory}: question-answering needs a tokenizer.json, which knows where in the text "
                "each token stands; save the fast tokenizer"
            )

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        question, context = super().parse_inputs(value if isinstance(value, Mapping) else {})
        if not context or not question.strip() or not context.strip():
            raise PredictionException('Send JSON with "question" and "context", both texts.', 400)
        if self.max_length is not None and len(self.tokenizer(question).input_ids) > self.max_length // 2:
            raise PredictionException(
                f"The question is longer than half of the model's {self.max_length} tokens.", 400
            )
        return question, context

    def encode(self, examples: Sequence[TaskInput]) -> ContextWindows:
        options: dict[str, Any] = {"truncation": False}
        if self.max_length is not None:
            stride = min(_MAX_STRIDE, self.max_length // 4)  # less than the tokens that a question leaves
            options = {
                "truncation": "only_second",
                "max_length": self.max_length,
                "stride": stride,
                "return_overflowing_tokens": True,
            }
        encoded = self.tokenizer(
            [example.value for example in examples],
            [example.pair for example in examples],
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
            **options,
        )
        count = len(encoded["input_ids"])
        sequence_ids = [encoded.sequence_ids(index) for index in range(count)]
        context_mask = torch.tensor([[part == 1 for part in window] for window in sequence_ids])
        text_mask = torch.tensor([[part is not None for part in window] for window in sequence_ids])
        rows = encoded.pop("overflow_to_sample_mapping", torch.arange(count)).tolist()
        offsets = encoded.pop("offset_mapping").tolist()
        return ContextWindows(self.drop_unsupported(encoded), rows, context_mask, text_mask, offsets)

    def forward(self, model: Any, encoded: ContextWindows, device: Any) -> Any:
        return super().forward(model, encoded.inputs, device)

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attributions of each token to the answer's start and to its end, as a list of two.

        Their scores are the two logits. ``target`` selects one of them (start, end), or other tokens of the
        context, ``{"start": 9, "end": 10}``, counted from 0 in the window of the answer.
        """
        windows = self.encode([example])
        with torch.inference_mode():
            output = self.forward(model, windows, model.device)
        [best] = self._best_spans(output, windows, [example])
        attended = windows.inputs["attention_mask"][best.window].cpu().bool()
        encoded = {
            name: value[best.window : best.window + 1, attended] for name, value in windows.inputs.items()
        }
        shift = int((~attended[: best.first]).sum())  # padding on the left
        answer = {"start": best.first - shift, "end": best.last - shift}
        context = windows.context_mask[best.window, attended].nonzero().flatten().tolist()

        def explain_side(side: str, token: int) -> dict[str, Any]:
            explanation = attributions.attribute_encoded(
                model,
                self.tokenizer,
                encoded,
                windows.text_mask[best.window, attended],
                options.for_target(token),
                lambda output: output[f"{side}_logits"],
            )
            return {"target": {side: token}, **explanation}

        sides = _select_sides(options.target, answer, context)
        explanations = [explain_side(side, token) for side, token in sides.items()]
        return explanations if len(explanations) > 1 else explanations[0]

    def postprocess(self, output: Any, encoded: ContextWindows, examples: Sequence[TaskInput]) -> list[Any]:
        answers = []
        for example, best in zip(examples, self._best_spans(output, encoded, examples)):
            offsets = encoded.offsets[best.window]
            start, end = offsets[best.first][0], offsets[best.last][1]
            answer = (example.pair or "")[start:end]
            answers.append({"score": best.score, "start": start, "end": end, "answer": answer})
        return answers

    def _best_spans(
        self, output: Any, encoded: ContextWindows, examples: Sequence[TaskInput]
    ) -> list[AnswerSpan]:
        starts = (
            to_cpu_float32(output.start_logits).masked_fill(~encoded.context_mask, -torch.inf).softmax(-1)
        )
        ends = to_cpu_float32(output.end_logits).masked_fill(~encoded.context_mask, -torch.inf).softmax(-1)
        best = [AnswerSpan(-1.0, 0, 0, 0)] * len(examples)
        for window, row in enumerate(encoded.rows):
            max_answer_len = examples[row].parameters.get("max_answer_len", 15)
            scores = torch.outer(starts[window], ends[window]).triu().tril(max_answer_len - 1)
            score, position = scores.flatten().max(0)
            if float(score) > best[row].score:
                best[row] = AnswerSpan(float(score), window, *divmod(int(position), len(scores)))
        return best


def _select_sides(target: Any, answer: Mapping[str, int], context: list[int]) -> dict[str, int]:
    """Return the selected sides (start, end) and their tokens. Raises PredictionException."""
    if target is None:
        return {**answer}
    if isinstance(target, str) and target in answer:
        return {target: answer[target]}
    sides = {side: parse_integer(token) for side, token in (parse_object(target) or {}).items()}
    tokens = {side: token for side, token in sides.items() if token is not None}
    if (
        not sides
        or tokens != sides
        or not sides.keys() <= answer.keys()
        or not set(tokens.values()) <= set(context)
    ):
        raise PredictionException(
            f'The target {target!r:.100} is none of start, end and {{"start": {answer["start"]}, "end": '
            f"{answer['end']}}}; the context's tokens are {context[0]} to {context[-1]}.",
            400,
        )
    return tokens
