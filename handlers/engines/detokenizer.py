"""The text of tokens as they come, in pieces that stay as they are."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

_LONGEST = 32  # characters that are held back for the end of their word

_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class Detokenizer:
    """Whole words leave, as soon as the next one begins; joined they are the whole ``text``.

    Held back is what later tokens may change: bytes that are no character yet, the last word, and what may become
    one of ``stops``. Where one of these stands in the text, the text ends before it and ``stopped`` is true.
    ``decode`` makes text of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # all that has left
        self.stopped = False
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._begin = 0  # decoding begins here: what it makes of a token depends on the ones just before
        self._read = 0  # up to here the tokens' text is whole
        self._taken = 0  # characters of the text from _begin on that were taken already
        self._held = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that can leave now that these ``tokens`` came."""
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._decode(self._tokens[self._begin :])
        whole = text.rstrip(_UNKNOWN)
        if len(whole) > self._taken:
            self._held += whole[self._taken :]
            self._taken = len(whole)
            if len(whole) == len(text):
                self._begin, self._read = self._read, len(self._tokens)
                self._taken = len(self._decode(self._tokens[self._begin :]))
        return self._leave(self._end_of_words())

    def finish(self) -> str:
        """The rest, when no token will come."""
        if self.stopped:
            return ""
        self._held += self._decode(self._tokens[self._begin :])[self._taken :]
        self._begin = len(self._tokens)
        self._taken = 0
        return self._leave(len(self._held))

    def _leave(self, end: int) -> str:
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            end = min(found)
        piece, self._held = self._held[:end], self._held[end:]
        self.text += piece
        return piece

    def _end_of_words(self) -> int:
        held = self._held
        end = len(held)
        while end and _of_a_word(held[end - 1]):
            end -= 1
        if not end and len(held) > _LONGEST:
            end = len(held)
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(held)), 0, -1):
                if held.endswith(stop[:length]):
                    end = min(end, len(held) - length)
                    break
        return end


def _of_a_word(character: str) -> bool:
    """Whether the word may go on after it; in Chinese and Japanese each character stands for itself."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"
