"""The words that a text model knows: ``source_vocab.pt`` in any form that archives bring, read as data alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerLoadError, PredictionException


class Vocabulary(dict[str, int]):
    """Token to index. A token that is not in it has ``default_index``; without one, PredictionException (400)."""

    def __init__(self, tokens: Mapping[str, int] | Iterable[str], default_index: int | None = None) -> None:
        if not isinstance(tokens, Mapping):
            tokens = {token: index for index, token in enumerate(tokens)}
        super().__init__(tokens)
        self.default_index = default_index

    def __missing__(self, token: str) -> int:
        if self.default_index is None:
            raise PredictionException(f"The model's vocabulary has no {token!r}, and no index for unknown words.", 400)
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
    """The vocabulary that ``torch.save`` wrote to ``file``: a dict, a list of tokens, or a torchtext Vocab.

    torchtext itself is not needed. Unknown words have the index that the Vocab says, or that of ``<unk>``
    in a dict or list. Only a ``trusted`` file may hold other objects. HandlerLoadError where it is none of these.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            found = torch.load(file, map_location="cpu", weights_only=not trusted)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes fail in as many ways as there are opcodes
        raise HandlerLoadError(
            f"{file}: this cannot be read as a vocabulary: it is damaged, or holds more than one. Save a dict of token "
            "to index with torch.save; or, if you trust the file to run code as it loads, write trusted: true in "
            "model-config.yaml."
        ) from error
    vocabulary = _vocabulary(found)
    if vocabulary is None:
        raise HandlerLoadError(
            f"{file}: a vocabulary is a dict of token to index, a list of tokens, or a torchtext Vocab, and this is a "
            f"{type(found).__name__}. Save vocab.get_stoi() with torch.save."
        )
    return vocabulary


def _vocabulary(found: Any) -> Vocabulary | None:
    if isinstance(found, Mapping) and all(isinstance(index, int) for index in found.values()):
        default = found.default_factory() if isinstance(found, defaultdict) and found.default_factory else None
        return Vocabulary(found, found.get("<unk>") if default is None else default)
    if isinstance(found, (list, tuple)) and all(isinstance(token, str) for token in found):
        return Vocabulary(found, found.index("<unk>") if "<unk>" in found else None)
    if isinstance(found, _Vocab):
        return found.vocabulary()
    if hasattr(found, "get_stoi"):  # torchtext's own, of a trusted file
        default = found.get_default_index() if hasattr(found, "get_default_index") else None
        return Vocabulary(found.get_stoi(), default)
    return None


class _Vocab:
    """In the place of torchtext's Python class: until 0.8 it has the tokens itself, later it wraps the one below."""

    def vocabulary(self) -> Vocabulary | None:
        state = vars(self)
        inner = state.get("vocab")
        if isinstance(inner, _VocabState):
            return inner.vocabulary()
        tokens = state.get("stoi") or state.get("itos")
        return None if tokens is None else Vocabulary(tokens, state.get("unk_index", 0))


class _VocabState:
    """In the place of torchtext's C++ class: (version, [default index], tokens, tensors)."""

    def __setstate__(self, state: tuple[str, list[int], list[str], list[Any]]) -> None:
        _, self.default, self.tokens, _ = state

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokens, self.default[0] if self.default else None)


def _dict(default_factory: Any) -> dict[str, int]:
    """A defaultdict's items; what stands for unknown words is the Vocab's to say."""
    return {}


def _unknown() -> int:
    return 0


_STAND_INS: list[Any] = [
    (_dict, "collections.defaultdict"),
    (_Vocab, "torchtext.vocab.Vocab"),
    (_Vocab, "torchtext.vocab.vocab.Vocab"),
    (_VocabState, "torchtext._torchtext.Vocab"),
    (_VocabState, "torchtext._torchtext.VocabPybind"),
    (_unknown, "torchtext.vocab._default_unk_index"),
]
