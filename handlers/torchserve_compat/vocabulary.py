"""Vocabularies of text models: ``source_vocab.pt`` in any form of archives, read as data alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerLoadError, PredictionException


class Vocabulary(dict[str, int]):
    """A mapping from token to index.

    An unknown token has ``default_index``; without one, it raises PredictionException (400).
    """

    def __init__(self, tokens: Mapping[str, int] | Iterable[str], default_index: int | None = None) -> None:
        if not isinstance(tokens, Mapping):
            tokens = {token: index for index, token in enumerate(tokens)}
        super().__init__(tokens)
        self.default_index = default_index

    def __missing__(self, token: str) -> int:
        if self.default_index is None:
            raise PredictionException(
                f"The model's vocabulary has no {token!r}, and no index for unknown words.", 400
            )
        return self.default_index

    @property
    def stoi(self) -> dict[str, int]:
        return self

    @property
    def itos(self) -> list[str]:
        return sorted(self, key=self.__getitem__)

    def get_stoi(self) -> dict[str, int]:
        return dict(self)

    def get_itos(self) -> list[str]:
        return self.itos

    def get_default_index(self) -> int | None:
        return self.default_index

    def lookup_indices(self, tokens: Iterable[str]) -> list[int]:
        return [self[token] for token in tokens]

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        return self.lookup_indices(tokens)


def load(file: Path, trusted: bool = False) -> Vocabulary:
    """Return the vocabulary that ``torch.save`` wrote to ``file``: a dict, a list of tokens, or a torchtext
    Vocab.

    torchtext itself is not needed. Unknown words have the Vocab's default index, or that of ``<unk>`` in a
    dict or list. Only a ``trusted`` file may hold other objects. Raises HandlerLoadError for any other file.
    """
    try:
        with torch.serialization.safe_globals(_REPLACEMENT_CLASSES):
            value = torch.load(file, map_location="cpu", weights_only=not trusted)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes raise many types of errors
        raise HandlerLoadError(
            f"{file}: this cannot be read as a vocabulary: it is damaged, or holds more than one. Save a "
            "dict of token to index with torch.save; or, if you trust the file to run code as it loads, "
            "register the model with trusted=true, or name it in store.trusted."
        ) from error
    vocabulary = _convert(value)
    if vocabulary is None:
        raise HandlerLoadError(
            f"{file}: a vocabulary is a dict of token to index, a list of tokens, or a torchtext Vocab, and "
            f"this is a {type(value).__name__}. Save vocab.get_stoi() with torch.save."
        )
    return vocabulary


def _convert(value: Any) -> Vocabulary | None:
    if isinstance(value, Mapping) and all(isinstance(index, int) for index in value.values()):
        default = (
            value.default_factory() if isinstance(value, defaultdict) and value.default_factory else None
        )
        return Vocabulary(value, value.get("<unk>") if default is None else default)
    if isinstance(value, (list, tuple)) and all(isinstance(token, str) for token in value):
        return Vocabulary(value, value.index("<unk>") if "<unk>" in value else None)
    if isinstance(value, _Vocab):
        return value.to_vocabulary()
    if hasattr(value, "get_stoi"):  # torchtext's own class, in a trusted file
        default = value.get_default_index() if hasattr(value, "get_default_index") else None
        return Vocabulary(value.get_stoi(), default)
    return None


class _Vocab:
    """A replacement of torchtext's Python class.

    Until 0.8 it has the tokens itself; later it wraps the class below.
    """

    def to_vocabulary(self) -> Vocabulary | None:
        state = vars(self)
        wrapped = state.get("vocab")
        if isinstance(wrapped, _VocabState):
            return wrapped.to_vocabulary()
        tokens = state.get("stoi") or state.get("itos")
        return None if tokens is None else Vocabulary(tokens, state.get("unk_index", 0))


class _VocabState:
    """A replacement of torchtext's C++ class: (version, [default index], tokens, tensors)."""

    def __setstate__(self, state: tuple[str, list[int], list[str], list[Any]]) -> None:
        _, self.default, self.tokens, _ = state

    def to_vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokens, self.default[0] if self.default else None)


def _dict(default_factory: Any) -> dict[str, int]:
    """Replace a defaultdict, whose default is ignored: the Vocab has the index of unknown words."""
    return {}


def _default_unknown_index() -> int:
    return 0


_REPLACEMENT_CLASSES: list[Any] = [
    (_dict, "collections.defaultdict"),
    (_Vocab, "torchtext.vocab.Vocab"),
    (_Vocab, "torchtext.vocab.vocab.Vocab"),
    (_VocabState, "torchtext._torchtext.Vocab"),
    (_VocabState, "torchtext._torchtext.VocabPybind"),
    (_default_unknown_index, "torchtext.vocab._default_unk_index"),
]
