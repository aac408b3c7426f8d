"""A tiny untrained model of the kind of Whisper, and WAV files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

RATE = 16_000
WINDOW_S = 2  # of the model


def save_whisper(folder: Path, multilingual: bool = True, timestamps: bool = True) -> Path:
    """Save a model whose tokens are bytes, with the languages en and de and a window of two seconds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<|endoftext|>"])}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    special = ["startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "notimestamps"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in special]})
    marks = [f"<|{index * 0.02:.2f}|>" for index in range(WINDOW_S * 50 + 1)]
    tokenizer.add_tokens([transformers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in special}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, encoder_layers=1, decoder_layers=1, d_model=16,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=WINDOW_S * 50, max_target_positions=64, pad_token_id=256, bos_token_id=256,
        eos_token_id=256, decoder_start_token_id=ids["startoftranscript"], init_std=0.5,
        begin_suppress_tokens=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config)
    generation = model.generation_config
    generation._from_model_config = False  # or the next are not read
    generation.max_length, generation.is_multilingual = 48, multilingual
    generation.prev_sot_token_id = ids["startofprev"]
    if timestamps:
        generation.no_timestamps_token_id, generation.max_initial_timestamp_index = ids["notimestamps"], 10
    if multilingual:
        generation.lang_to_id = {f"<|{name}|>": ids[name] for name in ("en", "de")}
        generation.task_to_id = {name: ids[name] for name in ("transcribe", "translate")}
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def make_noise(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).normal(0, 0.2, int(seconds * rate))
    return samples.clip(-1, 1).astype(np.float32)


def encode_wav(
    samples: np.ndarray, rate: int = RATE, kind: int = 1, bits: int = 16, extensible: bool = False
) -> bytes:
    """Return samples from -1 to 1, of one channel or of frames x channels, as a WAV file."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    scaled = samples.astype(np.float64).clip(-1, 1) * (2 ** (bits - 1) - 1)
    if kind == 3:
        data = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = (scaled.round() + 128).astype("u1").tobytes()
    else:
        whole = scaled.round().astype("<i8").reshape(-1, 1).view("u1").reshape(-1, 8)
        data = whole[:, : bits // 8].tobytes()
    frame = channels * bits // 8
    format = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * frame, frame, bits)
    if extensible:
        format += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # a chunk of odd size is padded
    for name, content in ((b"fmt ", format), (b"data", data)):
        chunks += name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks
