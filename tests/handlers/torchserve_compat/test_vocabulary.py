"""Tests of vocabularies in the forms of archives; torchtext itself wrote two of them
(tests/recorders/vocabulary.py).
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.torchserve_compat import vocabulary

DATA = Path(__file__).parents[1] / "data"
# A file as torchtext 0.5 and 0.8 wrote it: a class of that name with these attributes.
OLD_TORCHTEXT = """
import sys, types
from collections import Counter, defaultdict
import torch

module = types.ModuleType("torchtext.vocab")
sys.modules.update({"torchtext": types.ModuleType("torchtext"), "torchtext.vocab": module})

def _default_unk_index():
    return 0

class Vocab:
    pass

for obj in (Vocab, _default_unk_index):
    obj.__module__ = "torchtext.vocab"
    setattr(module, obj.__name__, obj)
vocab = Vocab()
vocab.freqs, vocab.itos, vocab.vectors = Counter(cat=2, the=3), ["<unk>", "the", "cat"], None
indices = {word: index for index, word in enumerate(vocab.itos)}
vocab.stoi = defaultdict(_default_unk_index, indices)
torch.save(vocab, sys.argv[1] + "/0.5.pt")
vocab.stoi, vocab.unk_index = indices, 0
torch.save(vocab, sys.argv[1] + "/0.8.pt")
"""


def save(value: Any, directory: Path) -> Path:
    torch.save(value, directory / "source_vocab.pt")
    return directory / "source_vocab.pt"


def test_torchtexts_vocab_is_read() -> None:
    words = vocabulary.load(DATA / "torchtext_vocab.pt")
    assert words == {"<unk>": 0, "hello": 1, "hello world": 2, "not": 3, "world": 4}
    assert words["never heard of"] == words.get_default_index() == 0
    assert words(["world", "x", "not"]) == [4, 0, 3] and words.get_itos()[2] == words.itos[2] == "hello world"
    assert words.get_stoi() == words.stoi == words and len(words) == 5 and "x" not in words


def test_a_vocab_without_a_default_index_rejects_unknown_words() -> None:
    words = vocabulary.load(DATA / "torchtext_vocab_without_default.pt")
    assert words == {"hello": 0, "world": 1} and words.get_default_index() is None
    with pytest.raises(PredictionException, match="has no 'x'"):
        words["x"]


@pytest.mark.slow
def test_vocabs_of_old_torchtext_are_read(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", OLD_TORCHTEXT, str(tmp_path)], check=True)
    for version in ("0.5", "0.8"):
        words = vocabulary.load(tmp_path / f"{version}.pt")
        assert words == {"<unk>": 0, "the": 1, "cat": 2} and words["dog"] == 0, version


def test_dicts_and_lists_are_read(tmp_path: Path) -> None:
    assert vocabulary.load(save({"a": 3, "<unk>": 9}, tmp_path))["b"] == 9
    words = vocabulary.load(save(["<unk>", "a"], tmp_path))
    assert words == {"<unk>": 0, "a": 1} and words["b"] == 0
    assert vocabulary.load(save(["a"], tmp_path)).get_default_index() is None


def test_other_objects_are_rejected(tmp_path: Path) -> None:
    for value in ({"a": "b"}, ["a", 1], torch.ones(1)):
        with pytest.raises(
            HandlerLoadError, match=r"source_vocab\.pt: a vocabulary is a dict of token to index"
        ):
            vocabulary.load(save(value, tmp_path))
    (tmp_path / "broken.pt").write_bytes(b"PK no")
    for file in (save(types.SimpleNamespace(a=1), tmp_path), tmp_path / "broken.pt"):
        with pytest.raises(HandlerLoadError, match=r"cannot be read as a vocabulary.*trusted=true"):
            vocabulary.load(file)


def test_trusted_files_may_hold_objects(tmp_path: Path) -> None:
    file = save(CustomVocab(), tmp_path)
    with pytest.raises(HandlerLoadError, match="trusted=true"):
        vocabulary.load(file)
    words = vocabulary.load(file, trusted=True)
    assert words == {"a": 4} and words["b"] == 2


class CustomVocab:
    """An author's own class with the methods of torchtext's."""

    def get_stoi(self) -> dict[str, int]:
        return {"a": 4}

    def get_default_index(self) -> int:
        return 2
