"""The part of a text that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers import explanations
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explanations import Question
from handlers.tasks.base import COUNT, Example, TextTask, fields, floats, number

_STRIDE = 128  # tokens that a part of a long context has in common with the next


class Windows(NamedTuple):
    """Every context in parts that the model can read, each behind its question."""

    inputs: Any
    row: list[int]  # whose part it is
    inside: torch.Tensor  # windows x tokens: which tokens are the context's
    words: torch.Tensor  # likewise, which are the question's or the context's
    offsets: list[list[tuple[int, int]]]  # where in the context each stands


class Span(NamedTuple):
    """The likeliest part of a context: ``first`` to ``last`` are tokens of ``window``."""

    score: float
    window: int
    first: int
    last: int


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
        parts = [encoded.sequence_ids(index) for index in range(count)]
        inside = torch.tensor([[part == 1 for part in row] for row in parts])
        words = torch.tensor([[part is not None for part in row] for row in parts])
        row = encoded.pop("overflow_to_sample_mapping", torch.arange(count)).tolist()
        offsets = encoded.pop("offset_mapping").tolist()
        return Windows(self.kept(encoded), row, inside, words, offsets)

    def forward(self, model: Any, encoded: Windows, device: Any) -> Any:
        return super().forward(model, encoded.inputs, device)

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What made the answer begin and end where it does: a list of two, with an attribution for each token.

        Their scores are the two logits. ``target`` asks for one of them (start, end), or for other tokens of the
        context, ``{"start": 9, "end": 10}``, counted from 0 in the part of it that the answer was found in.
        """
        windows = self.encode([example])
        with torch.inference_mode():
            output = self.forward(model, windows, model.device)
        [best] = self._best(output, windows, [example])
        real = windows.inputs["attention_mask"][best.window].cpu().bool()
        encoded = {name: value[best.window : best.window + 1, real] for name, value in windows.inputs.items()}
        shift = int((~real[: best.first]).sum())  # padding on the left
        answer = {"start": best.first - shift, "end": best.last - shift}
        context = windows.inside[best.window, real].nonzero().flatten().tolist()

        def explained(side: str, token: int) -> dict[str, Any]:
            found = explanations.of_encoded(
                model,
                self.tokenizer,
                encoded,
                windows.words[best.window, real],
                question.about(token),
                lambda output: output[f"{side}_logits"],
            )
            return {"target": {side: token}, **found}

        asked = _sides(question.target, answer, context)
        found = [explained(side, token) for side, token in asked.items()]
        return found if len(found) > 1 else found[0]

    def answers(self, output: Any, encoded: Windows, examples: Sequence[Example]) -> list[Any]:
        answers = []
        for example, best in zip(examples, self._best(output, encoded, examples)):
            places = encoded.offsets[best.window]
            start, end = places[best.first][0], places[best.last][1]
            answer = (example.pair or "")[start:end]
            answers.append({"score": best.score, "start": start, "end": end, "answer": answer})
        return answers

    def _best(self, output: Any, encoded: Windows, examples: Sequence[Example]) -> list[Span]:
        starts = floats(output.start_logits).masked_fill(~encoded.inside, -torch.inf).softmax(-1)
        ends = floats(output.end_logits).masked_fill(~encoded.inside, -torch.inf).softmax(-1)
        best = [Span(-1.0, 0, 0, 0)] * len(examples)
        for window, row in enumerate(encoded.row):
            longest = examples[row].parameters.get("max_answer_len", 15)
            together = torch.outer(starts[window], ends[window]).triu().tril(longest - 1)
            score, place = together.flatten().max(0)
            if float(score) > best[row].score:
                best[row] = Span(float(score), window, *divmod(int(place), len(together)))
        return best


def _sides(target: Any, answer: Mapping[str, int], context: list[int]) -> dict[str, int]:
    """Which of start and end is asked about, and for which token. Raises PredictionException."""
    if target is None:
        return {**answer}
    if isinstance(target, str) and target in answer:
        return {target: answer[target]}
    said = {side: number(token) for side, token in (fields(target) or {}).items()}
    if not said or not said.keys() <= answer.keys() or not set(said.values()) <= set(context):
        raise PredictionException(
            f'The target {target!r:.100} is none of start, end and {{"start": {answer["start"]}, "end": '
            f"{answer['end']}}}; the context's tokens are {context[0]} to {context[-1]}.",
            400,
        )
    return said  # type: ignore[return-value]
