"""Tokenizers of texts as in torchtext, which is discontinued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

# Basic English puts spaces around the first characters, and replaces the others by a space.
_SPACED = {ord(mark): f" {mark} " for mark in "'.,()!?"} | {ord(mark): " " for mark in ";:"}


def basic_english(line: str) -> list[str]:
    """Return lower-case words and punctuation marks: ``"Don't go."`` is ``["don", "'", "t", "go", "."]``.

    Double quotes and line breaks of HTML (``<br />``) are dropped.
    """
    return line.lower().replace('"', "").replace("<br />", " ").translate(_SPACED).split()


Tokenizer = Callable[[str], list[str]]


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """Return a function from a line to its tokens.

    ``None`` splits at spaces; ``"basic_english"`` and a custom function are the other values.
    """
    if callable(tokenizer):
        return tokenizer
    if tokenizer is None:
        return str.split
    if tokenizer != "basic_english":
        raise ValueError(
            f"There is no tokenizer {tokenizer!r}: give basic_english, None, or a function of yours."
        )
    if language != "en":
        raise ValueError(f"The tokenizer basic_english reads English (en), not {language!r}.")
    return basic_english


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then every two adjacent ones joined by a space, and so on up to ``ngrams`` of
    them.
    """
    yield from token_list
    for length in range(2, ngrams + 1):
        for start in range(len(token_list) - length + 1):
            yield " ".join(token_list[start : start + length])
