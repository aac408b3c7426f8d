"""Tests of the batch streamer."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from handlers.engines.streamer import TextIteratorStreamerBatch


class LetterTokenizer:
    """A tokenizer whose tokens are numbers of letters."""

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(chr(97 + int(token)) for token in tokens) + options.get("end", "")


def test_missing_transformers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers, .*requirements"):
        TextIteratorStreamerBatch(LetterTokenizer(), 2)


def test_each_step_has_the_text_of_every_row() -> None:
    streamer = TextIteratorStreamerBatch(LetterTokenizer(), 2, skip_prompt=True, timeout=60)

    def generate() -> None:
        streamer.put(torch.tensor([[9, 9], [8, 8]]))  # the prompts
        for tokens in ([0, 1], [2, 3]):
            streamer.put(torch.tensor(tokens))
        streamer.end()

    thread = threading.Thread(target=generate)
    thread.start()
    steps = list(streamer)
    thread.join()
    assert ["".join(step[row]["text"] for step in steps) for row in (0, 1)] == ["ac", "bd"]
    with pytest.raises(ValueError, match=r"for 2 rows and got tokens of shape \(3,\)"):
        streamer.put(torch.tensor([1, 2, 3]))
