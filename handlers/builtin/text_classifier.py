"""What a text is about."""

from __future__ import annotations

from typing import Any

import torch

from handlers import explanations
from handlers.errors import PredictionException
from handlers.labels import map_class_to_label
from handlers.text import TextHandler
from handlers.timer import timed
from handlers.tokens import ngrams_iterator


class Texts(tuple):
    """What ``preprocess`` makes: ``(indices, words)`` of all the rows, one after the other.

    ``offsets`` has where each row begins among the indices, ``words_by_row`` the words of each.
    """

    offsets: torch.Tensor
    words_by_row: list[list[str]]


class TextClassifier(TextHandler):
    """``{label: probability}`` of each class for each text.

    The model is called with the indices of all the texts' tokens and of their n-grams, and with the place at
    which each text begins, as an ``nn.EmbeddingBag`` takes them.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: list[Any]) -> Texts:
        rows = self._each(data, self._read)
        indices = [index for row, _ in rows for index in row]
        starts = [0]
        for row, _ in rows[:-1]:
            starts.append(starts[-1] + len(row))
        words = [word for _, row in rows for word in row]
        texts = Texts((torch.tensor(indices, dtype=torch.long, device=self.device), words))
        texts.offsets = torch.tensor(starts, dtype=torch.long, device=self.device)
        texts.words_by_row = [row for _, row in rows]
        return texts

    def _read(self, row: Any) -> tuple[list[int], list[str]]:
        """A row's indices, and its words after cleaning."""
        text = self._remove_html_tags(self.get_text(row)).lower()
        text = self._remove_accented_characters(self._expand_contractions(text))
        words = self._tokenize(self._remove_punctuation(text))
        if not words:
            raise PredictionException("There is no word in the text.", 400)
        return [self.source_vocab[token] for token in ngrams_iterator(words, self.ngrams)], words

    @timed
    def inference(self, data: tuple[torch.Tensor, list[str]], *args: Any, **kwargs: Any) -> torch.Tensor:
        indices, _ = data
        with torch.inference_mode():
            return self.model(indices, self._offsets(data), *args, **kwargs)

    def _offsets(self, data: tuple[torch.Tensor, list[str]]) -> torch.Tensor:
        """A plain pair, as a subclass may make it, is one text."""
        return data.offsets if isinstance(data, Texts) else torch.tensor([0], device=self.device)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        return map_class_to_label(torch.softmax(data, dim=-1).tolist(), self.mapping)

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """The insights into each text; its ``target`` field says into which class, 0 by default."""
        if not isinstance(data_preprocess, Texts):
            return super().explain_handle(data_preprocess, raw_data)
        indices, _ = data_preprocess
        starts = data_preprocess.offsets.tolist()
        ends = [*starts[1:], len(indices)]
        inputs = [(indices[start:end], words) for start, end, words in zip(starts, ends, data_preprocess.words_by_row)]
        return self._insights_by_row(inputs, raw_data)

    def get_insights(self, tensor_data: tuple[torch.Tensor, list[str]], raw_data: Any, target: Any = 0) -> list[Any]:
        """``[{"importances": ..., "words": ..., "attributions": ...}]`` of one text.

        ``attributions`` has one number for each word, and they sum to ``score - baseline_score``, within what the
        steps allow; ``importances`` has what each part of the text's embedding did, as TorchServe sums it up.
        """
        indices, words = tensor_data
        blank = torch.zeros_like(indices)  # the text that says nothing
        layer = getattr(self.model, "embedding", None)
        question = self.question.of(self.asked, target)
        layers = [] if layer is None else [layer]
        found, score, baseline_score = explanations.of_tokens(self._texts, layers, indices, blank, question)
        in_bag = found.dim() == 2 and isinstance(layer, torch.nn.EmbeddingBag)
        importances = self.summarize_attributions(found.sum(0, keepdim=True) if in_bag else found)
        return [
            {
                "importances": importances.tolist(),
                "words": self.get_word_token(words),
                "attributions": _by_word(found.sum(-1) if found.dim() == 2 else found, len(words), self.ngrams),
                "score": score,
                "baseline_score": baseline_score,
            }
        ]

    def _texts(self, indices: torch.Tensor) -> Any:
        """The model's answer to texts of one length: rows x indices."""
        count, length = indices.shape
        return self.model(indices.flatten(), torch.arange(0, count * length, length, device=indices.device))


def _by_word(attributions: torch.Tensor, words: int, ngrams: int) -> list[float]:
    """An n-gram's attribution is its words', in equal shares; what belongs to no n-gram is nobody's."""
    shares = [0.0] * words
    values = iter(attributions.tolist())
    for length in range(1, ngrams + 1):
        for start, value in zip(range(words - length + 1), values):
            for word in range(start, start + length):
                shares[word] += value / length
    return shares
