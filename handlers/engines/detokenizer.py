"""Incremental detokenization into pieces of text that later tokens do not change."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

_MAX_HELD_CHARACTERS = 32  # a longer word is emitted before its end

_REPLACEMENT_CHARACTER = "\ufffd"  # decoders write it for invalid or incomplete bytes


class Detokenizer:
    """An incremental decoder that emits whole words; the pieces joined are ``text``.

    Text that later tokens may change is held back: incomplete characters, the last word, and the beginning of
    a string of ``stops``. The text ends before the first stop string, which ``stop`` is then.
    ``decode`` converts token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # all emitted text
        self.stop: str | None = None
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._start = 0  # first decoded token: the text of a token depends on the ones just before it
        self._complete = 0  # the text of the tokens up to here is complete
        self._consumed = 0  # characters of the text from _start on that were consumed already
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, tokens: Sequence[int]) -> str:
        """Add ``tokens`` and return the text that is now final."""
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._decode(self._tokens[self._start :])
        complete = text.rstrip(_REPLACEMENT_CHARACTER)
        if len(complete) > self._consumed:
            self._held += complete[self._consumed :]
            self._consumed = len(complete)
            if len(complete) == len(text):
                self._start, self._complete = self._complete, len(self._tokens)
                self._consumed = len(self._decode(self._tokens[self._start :]))
        return self._emit(self._end_of_words())

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        if self.stopped:
            return ""
        self._held += self._decode(self._tokens[self._start :])[self._consumed :]
        self._start = len(self._tokens)
        self._consumed = 0
        return self._emit(len(self._held))

    def _emit(self, end: int) -> str:
        matches = [(position, stop) for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if matches:
            end, self.stop = min(matches)
        emitted, self._held = self._held[:end], self._held[end:]
        self.text += emitted
        return emitted

    def _end_of_words(self) -> int:
        held = self._held
        end = len(held)
        while end and _continues_word(held[end - 1]):
            end -= 1
        if not end and len(held) > _MAX_HELD_CHARACTERS:
            end = len(held)
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(held)), 0, -1):
                if held.endswith(stop[:length]):
                    end = min(end, len(held) - length)
                    break
        return end


def _continues_word(character: str) -> bool:
    """Return whether a word may go on after it; a Chinese or Japanese character is a word by itself."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"
