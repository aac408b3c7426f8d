"""The built-in handler ``text_classifier``: texts to labels."""

from __future__ import annotations

from typing import Any

import torch

from handlers.builtin.labels import map_class_to_label
from handlers.builtin.text import TextHandler
from handlers.errors import PredictionException
from handlers.explain import attributions as explanations
from handlers.torchserve_compat.timer import timed
from handlers.torchserve_compat.tokens import ngrams_iterator


class TokenizedTexts(tuple):
    """The output of ``preprocess``: ``(indices, words)`` of all rows, concatenated.

    ``offsets`` has the start of each row among the indices, ``words_by_row`` the words of each row.
    """

    offsets: torch.Tensor
    words_by_row: list[list[str]]


class TextClassifier(TextHandler):
    """A handler that returns ``{label: probability}`` of each class for each text.

    The model is called with the indices of all texts' tokens and n-grams, and with the start of each text, as
    an ``nn.EmbeddingBag`` takes them.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: list[Any]) -> TokenizedTexts:
        rows = self._map_rows(data, self._parse_row)
        indices = [index for row, _ in rows for index in row]
        starts = [0]
        for row, _ in rows[:-1]:
            starts.append(starts[-1] + len(row))
        words = [word for _, row in rows for word in row]
        texts = TokenizedTexts((torch.tensor(indices, dtype=torch.long, device=self.device), words))
        texts.offsets = torch.tensor(starts, dtype=torch.long, device=self.device)
        texts.words_by_row = [row for _, row in rows]
        return texts

    def _parse_row(self, row: Any) -> tuple[list[int], list[str]]:
        """Return a row's indices, and its words after cleaning."""
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
        """Return the starts of the texts; a plain pair, as a subclass may return it, is one text."""
        return data.offsets if isinstance(data, TokenizedTexts) else torch.tensor([0], device=self.device)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        return map_class_to_label(torch.softmax(data, dim=-1).tolist(), self.mapping)

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """Return the insights into each text; its ``target`` field selects the class, 0 by default."""
        if not isinstance(data_preprocess, TokenizedTexts):
            return super().explain_handle(data_preprocess, raw_data)
        indices, _ = data_preprocess
        starts = data_preprocess.offsets.tolist()
        ends = [*starts[1:], len(indices)]
        inputs = [
            (indices[start:end], words)
            for start, end, words in zip(starts, ends, data_preprocess.words_by_row)
        ]
        return self._insights_by_row(inputs, raw_data)

    def get_insights(
        self, tensor_data: tuple[torch.Tensor, list[str]], raw_data: Any, target: Any = 0
    ) -> list[Any]:
        """Return ``[{"importances": ..., "words": ..., "attributions": ...}]`` of one text.

        ``attributions`` has one number for each word; they sum to ``score - baseline_score``, up to the error
        of the steps. ``importances`` has the attribution of each part of the text's embedding, summed as in
        TorchServe.
        """
        indices, words = tensor_data
        baseline = torch.zeros_like(indices)
        layer = getattr(self.model, "embedding", None)
        options = self.explanation_options.for_row(self.explained_row, target)
        layers = [] if layer is None else [layer]
        token_attributions, score, baseline_score = explanations.attribute_tokens(
            self._predict_texts, layers, indices, baseline, options
        )
        is_embedding_bag = token_attributions.dim() == 2 and isinstance(layer, torch.nn.EmbeddingBag)
        importances = self.summarize_attributions(
            token_attributions.sum(0, keepdim=True) if is_embedding_bag else token_attributions
        )
        return [
            {
                "importances": importances.tolist(),
                "words": self.get_word_token(words),
                "attributions": _sum_by_word(
                    token_attributions.sum(-1) if token_attributions.dim() == 2 else token_attributions,
                    len(words),
                    self.ngrams,
                ),
                "score": score,
                "baseline_score": baseline_score,
            }
        ]

    def _predict_texts(self, indices: torch.Tensor) -> Any:
        """Return the model's output for texts of one length: rows x indices."""
        count, length = indices.shape
        return self.model(indices.flatten(), torch.arange(0, count * length, length, device=indices.device))


def _sum_by_word(attributions: torch.Tensor, words: int, ngrams: int) -> list[float]:
    """Return the attribution of each word.

    An n-gram's attribution is divided equally among its words; other attributions are dropped.
    """
    shares = [0.0] * words
    values = iter(attributions.tolist())
    for length in range(1, ngrams + 1):
        for start, value in zip(range(words - length + 1), values):
            for word in range(start, start + length):
                shares[word] += value / length
    return shares
