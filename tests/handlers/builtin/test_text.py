"""Tests of texts to labels; expected words and numbers are TorchServe's for the same model and texts."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers.builtin.text import TextHandler
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.torchserve_compat.tokens import get_tokenizer, ngrams_iterator

MODEL = """
import torch

class Topics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(100, 2, mode="sum")
        torch.nn.init.zeros_(self.embedding.weight)
        self.embedding.weight.data[:, 0] = torch.arange(100)  # the sum of the indices
        self.embedding.weight.data[:, 1] = 1  # the number of tokens

    def forward(self, text, offsets):
        return self.embedding(text, offsets)
"""
WORDS = "<unk> the cat is not here the+cat cat+is is+not not+here as as+not".replace("+", "_").split()


@pytest.fixture
def classifier(archive: Callable[..., Path]) -> Callable[..., handlers.LoadedHandler]:
    """Return ``load(vocabulary)``: the text_classifier of an archive whose model sums its tokens' indices."""

    def load(words: Any = None) -> handlers.LoadedHandler:
        directory = archive(model=MODEL)
        tokens = {word.replace("_", " "): index for index, word in enumerate(WORDS)}
        torch.save(tokens if words is None else words, directory / "source_vocab.pt")
        (directory / "index_to_name.json").write_text(json.dumps({"0": "far", "1": "long"}))
        entry = handlers.load("text_classifier", directory, {})
        entry.initialize(Context("topics", str(directory), {"model": {"modelFile": "model.py"}}))
        return entry

    return load


def expected(indices: list[int]) -> Any:
    far, long = torch.softmax(torch.tensor([float(sum(indices)), float(len(indices))]), 0).tolist()
    return {"far": pytest.approx(far, abs=1e-6), "long": pytest.approx(long, abs=1e-6)}


def test_a_text_is_cleaned_tokenized_and_looked_up(classifier: Any, begin: Any) -> None:
    entry = classifier()
    indices, words = entry.instance.preprocess([{"body": "<b>The c&acirc;t</b> isn't, here&amp;!"}])
    assert words == ["the", "ct", "is", "not", "here"]
    assert indices.tolist() == [1, 0, 3, 4, 5, 0, 0, 8, 9]
    assert entry([{"data": "the cat"}], begin(entry.instance.context)) == [expected([1, 2, 6])]


@pytest.mark.parametrize("text", [b"The C\xc3\xa2t", bytearray("The C\u00e2t".encode()), "the cat"])
def test_text_is_read_in_any_form(classifier: Any, begin: Any, text: Any) -> None:
    entry = classifier()
    assert entry([{"body": text}], begin(entry.instance.context)) == [expected([1, 2, 6])]


def test_a_batch_returns_the_values_of_its_rows(classifier: Any, begin: Any) -> None:
    entry = classifier()
    rows = [
        {"body": "the cat"},
        {"body": 7},
        {"data": "not"},
        {"body": "..."},
        {"body": b"\xff"},
        {"body": "here"},
    ]
    first, number, second, empty, binary, third = entry(rows, begin(entry.instance.context, len(rows)))
    assert [first, second, third] == [expected([1, 2, 6]), expected([4]), expected([5])]
    for error, message in ((number, "no text"), (empty, "no word"), (binary, "not text in UTF-8")):
        assert isinstance(error, PredictionException) and error.error_code == 400 and message in error.message
    [error] = entry([{"body": "!"}], begin(entry.instance.context))
    assert error.error_code == 400


def test_an_unknown_word_without_an_index_fails_its_row(classifier: Any, begin: Any) -> None:
    entry = classifier(["the", "cat", "the cat"])
    known, unknown = entry([{"body": "the cat"}, {"body": "the dog"}], begin(entry.instance.context, 2))
    assert known == expected([0, 1, 2])
    assert unknown.error_code == 400 and "no 'dog'" in unknown.message


def test_a_subclass_may_take_one_text(classifier: Any, begin: Any) -> None:
    from handlers.builtin.text_classifier import TextClassifier

    entry = classifier()

    class SingleText(TextClassifier):
        ngrams = 1

        def preprocess(self, data: list[Any]) -> tuple[torch.Tensor, list[str]]:
            words = self.get_text(data[0]).split()
            return torch.tensor([self.source_vocab[word] for word in words]), words

    handler = SingleText()
    handler.initialize(entry.instance.context)
    assert handler.handle([{"body": "the cat"}], begin(handler.context)) == [expected([1, 2])]


def test_a_missing_vocabulary_is_an_error(archive: Any) -> None:
    directory = archive(model=MODEL)
    entry = handlers.load("text_classifier", directory, {})
    with pytest.raises(
        HandlerLoadError, match=r"source_vocab\.pt: the archive has no vocabulary.*--extra-files"
    ):
        entry.initialize(Context("topics", str(directory), {"model": {"modelFile": "model.py"}}))


def test_the_manifest_may_name_the_vocabulary(archive: Any) -> None:
    directory = archive(model=MODEL)
    torch.save({"a": 1}, directory / "words.pt")
    entry = handlers.load("text_classifier", directory, {})
    entry.initialize(
        Context("t", str(directory), {"model": {"modelFile": "model.py", "sourceVocab": "words.pt"}})
    )
    assert entry.instance.source_vocab == {"a": 1} and entry.instance.initialized


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("don't you're I'd've", "do not you are I wouldve"),
        ("can't shan't o'clock y'all", "cannot shall not of the clock you all"),
        ("ain't 'cause", "as not ecause"),  # the first letter is kept
        ("the cat's 'quoted'", "the cats quoted"),
        ("He's she's IT'S", "He is she is It is"),
    ],
)
def test_contractions_are_expanded(text: str, cleaned: str) -> None:
    assert TextHandler()._expand_contractions(text) == cleaned


def test_html_accents_and_punctuation_are_removed() -> None:
    handler = TextHandler()
    assert handler._remove_html_tags(f"<p class='x'>a{html.escape('<')}&#39;b</p>") == "ab"
    assert handler._remove_accented_characters("na\u00efve \u00fc\u4e2d") == "naive u"
    assert handler._remove_puncutation("a-b, c!") == handler._remove_punctuation("a-b, c!") == "ab c"
    assert handler.get_word_token(["\u0120the", "cat"]) == ["the", "cat"]


def test_tokenizers_and_ngrams() -> None:
    basic = get_tokenizer("basic_english")
    assert " ".join(basic('Don\'t "go"; (really)?<br />OK:1.5')) == "don ' t go ( really ) ? ok 1 . 5"
    assert get_tokenizer(None)("A b") == ["A", "b"] and get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="no tokenizer 'spacy'"):
        get_tokenizer("spacy")
    with pytest.raises(ValueError, match="English"):
        get_tokenizer("basic_english", "de")
    assert list(ngrams_iterator(["here", "we", "are"], 3)) == [
        "here",
        "we",
        "are",
        "here we",
        "we are",
        "here we are",
    ]
    assert list(ngrams_iterator(["here"], 2)) == ["here"]
