"""Writes the vocabularies torchtext_vocab.pt and torchtext_vocab_without_default.pt.

    python -m tests.recorders.vocabulary

It needs torchtext, which is no longer maintained (0.18.0 with torch 2.3.0 wrote the stored files).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torchtext.vocab import build_vocab_from_iterator

DATA = Path(__file__).parents[1] / "handlers/data"

if __name__ == "__main__":
    vocab = build_vocab_from_iterator([["hello", "world", "hello world", "not"]], specials=["<unk>"])
    vocab.set_default_index(vocab["<unk>"])
    torch.save(vocab, DATA / "torchtext_vocab.pt")
    torch.save(build_vocab_from_iterator([["hello", "world"]]), DATA / "torchtext_vocab_without_default.pt")
