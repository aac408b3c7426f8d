"""Vocabularies as archives bring them; torchtext itself wrote two of them (data/record_vocabulary.py)."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import vocabulary
from handlers.errors import HandlerLoadError, PredictionException

DATA = Path(__file__).parent / "data"
# What torchtext 0.5 and 0.8 wrote: a class of that name with these attributes.
OLD = """
import sys, types
from collections import Counter, defaultdict
import torch

module = types.ModuleType("torchtext.vocab")
sys.modules.update({"torchtext": types.ModuleType("torchtext"), "torchtext.vocab": module})

def _default_unk_index():
    return 0

class Vocab:
    pass

for thing in (Vocab, _default_unk_index):
    thing.__module__ = "torchtext.vocab"
    setattr(module, thing.__name__, thing)
vocab = Vocab()
vocab.freqs, vocab.itos, vocab.vectors = Counter(cat=2, the=3), ["<unk>", "the", "cat"], None
indices = {word: index for index, word in enumerate(vocab.itos)}
vocab.stoi = defaultdict(_default_unk_index, indices)
torch.save(vocab, sys.argv[1] + "/0.5.pt")
vocab.stoi, vocab.unk_index = indices, 0
torch.save(vocab, sys.argv[1] + "/0.8.pt")
"""


def saved(value: Any, directory: Path) -> Path:
    torch.save(value, directory / "source_vocab.pt")
    return directory / "source_vocab.pt"


def test_torchtexts_own() -> None:
    words = vocabulary.load(DATA / "torchtext_vocab.pt")
    assert words == {"<unk>": 0, "hello": 1, "hello world": 2, "not": 3, "world": 4}
    assert words["never heard of"] == words.get_default_index() == 0
    assert words(["world", "x", "not"]) == [4, 0, 3] and words.get_itos()[2] == words.itos[2] == "hello world"
    assert words.get_stoi() == words.stoi == words and len(words) == 5 and "x" not in words


def test_torchtexts_own_without_an_index_for_the_unknown() -> None:
    words = vocabulary.load(DATA / "torchtext_vocab_without_default.pt")
    assert words == {"hello": 0, "world": 1} and words.get_default_index() is None
    with pytest.raises(PredictionException, match="has no 'x'"):
        words["x"]


def test_torchtexts_of_old(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", OLD, str(tmp_path)], check=True)
    for version in ("0.5", "0.8"):
        words = vocabulary.load(tmp_path / f"{version}.pt")
        assert words == {"<unk>": 0, "the": 1, "cat": 2} and words["dog"] == 0, version


def test_a_dict_and_a_list(tmp_path: Path) -> None:
    assert vocabulary.load(saved({"a": 3, "<unk>": 9}, tmp_path))["b"] == 9
    words = vocabulary.load(saved(["<unk>", "a"], tmp_path))
    assert words == {"<unk>": 0, "a": 1} and words["b"] == 0
    assert vocabulary.load(saved(["a"], tmp_path)).get_default_index() is None


def test_what_is_no_vocabulary(tmp_path: Path) -> None:
    for wrong in ({"a": "b"}, ["a", 1], torch.ones(1)):
        with pytest.raises(HandlerLoadError, match=r"source_vocab\.pt: a vocabulary is a dict of token to index"):
            vocabulary.load(saved(wrong, tmp_path))
    (tmp_path / "broken.pt").write_bytes(b"PK no")
    for file in (saved(types.SimpleNamespace(a=1), tmp_path), tmp_path / "broken.pt"):
        with pytest.raises(HandlerLoadError, match="cannot be read as a vocabulary.*trusted: true"):
            vocabulary.load(file)


def test_a_trusted_file_may_hold_an_object(tmp_path: Path) -> None:
    file = saved(Words(), tmp_path)
    with pytest.raises(HandlerLoadError, match="trusted: true"):
        vocabulary.load(file)
    words = vocabulary.load(file, trusted=True)
    assert words == {"a": 4} and words["b"] == 2


class Words:
    """An author's own class that acts as torchtext's."""

    def get_stoi(self) -> dict[str, int]:
        return {"a": 4}

    def get_default_index(self) -> int:
        return 2
