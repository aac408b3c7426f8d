"""A streamer for ``model.generate`` that yields the text of all rows of a batch."""

from __future__ import annotations

from typing import Any

import torch


class TextIteratorStreamerBatch:
    """A ``streamer`` for ``model.generate`` of ``batch_size`` rows, iterated in another thread.

    Each step yields ``{"text": ...}`` per row, in order: the row's new text since the last step.
    ``tokenizer`` decodes the rows with ``decode_kwargs``; ``timeout`` is in seconds per step.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        try:
            from transformers import TextIteratorStreamer
        except ImportError as error:
            raise ImportError(
                "TextIteratorStreamerBatch needs transformers, which is not installed where the model runs: "
                "name it in the archive's requirements."
            ) from error
        self.batch_size = batch_size
        self.streamers = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs) for _ in range(batch_size)
        ]
        self.streamer_iterators = [iter(streamer) for streamer in self.streamers]

    def put(self, value: torch.Tensor) -> None:
        """Add the next tokens, one per row, or the prompts."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"This streamer is for {self.batch_size} rows and got tokens of shape {tuple(value.shape)}: "
                "make one for each batch, with its number of rows."
            )
        for streamer, tokens in zip(self.streamers, value.split(1)):
            streamer.put(tokens)

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> TextIteratorStreamerBatch:
        return self

    def __next__(self) -> list[dict[str, str]]:
        texts = [next(iterator, None) for iterator in self.streamer_iterators]
        if None in texts:  # the rows of a batch end together
            raise StopIteration
        return [{"text": text} for text in texts if text is not None]
