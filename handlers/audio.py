"""Decoding of audio in requests: WAV, without native libraries."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from handlers.errors import PredictionException

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# The first bytes of other formats, for the message of an error.
_OTHER_FORMATS = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\xff\xfb": "MP3",
    b"\xff\xf3": "MP3",
    b"\xff\xf2": "MP3",
    b"\x1a\x45\xdf\xa3": "WebM",
    b"RF64": "RF64",
}
_RATES = (1000, 384_000)  # per second
_MAX_CHANNELS = 32
_MAX_SAMPLE = 2**31  # of floats that an integer's range was written as; the squares of spectra stay finite
_BLOCK_S, _MARGIN_S = 30, 1  # of resampling: whole seconds are whole numbers of samples at each rate


class WaveFormat(NamedTuple):
    """The encoding of samples; ``bits`` are those of one sample of one channel."""

    kind: int
    channels: int
    rate: int
    bits: int


def decode_wav(content: bytes | bytearray | memoryview, max_seconds: float) -> tuple[np.ndarray, int]:
    """Return the samples of a WAV file from -1 to 1 as float32, the mean of its channels, and their rate.

    Raises PredictionException with status 400 for other content, and 413 where it lasts longer than
    ``max_seconds``.
    """
    view = memoryview(content).cast("B")
    if view[:4] != b"RIFF" or view[8:12] != b"WAVE":
        raise PredictionException(
            f"The audio is {_name_format(bytes(view[:12]))}, and only WAV is read: convert it, as by "
            "ffmpeg -i FILE -ar 16000 -ac 1 audio.wav.",
            400,
        )
    format: WaveFormat | None = None
    for name, chunk in _iterate_chunks(view):
        if name == b"fmt ":
            format = _parse_format(chunk)
        elif name == b"data" and format is not None:
            return _convert(chunk, format, max_seconds), format.rate
    raise PredictionException("The WAV file is incomplete: it has no format, or no data behind it.", 400)


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return ``samples`` at the rate ``target``; frequencies that it cannot have are cut off."""
    if rate == target or not len(samples):
        return samples
    blocks = []
    for start in range(0, len(samples), _BLOCK_S * rate):
        first = max(0, start - _MARGIN_S * rate)
        last = min(len(samples), start + (_BLOCK_S + _MARGIN_S) * rate)
        part = torch.from_numpy(np.ascontiguousarray(samples[first:last]))
        length = -(-len(part) * target // rate)
        # Padding to whole seconds keeps the ratio of lengths exact, and separates the end from the start.
        padded = torch.nn.functional.pad(part, (0, -len(part) % rate + rate))
        size = len(padded) // rate * target
        spectrum = torch.fft.rfft(padded)[: size // 2 + 1]
        resampled = torch.fft.irfft(spectrum, size)[:length] * (target / rate)
        skipped = (start - first) // rate * target
        blocks.append(resampled[skipped : skipped + _BLOCK_S * target].numpy())
    return np.concatenate(blocks)


def _iterate_chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the name and content of each chunk; a stream's last may have a size beyond the file's end."""
    position = 12
    while position + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, position)
        yield name, view[position + 8 : position + 8 + size]
        position += 8 + size + size % 2


def _parse_format(chunk: memoryview) -> WaveFormat:
    if len(chunk) < 16:
        raise PredictionException("The WAV file is incomplete: its format is cut off.", 400)
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    if (kind, bits) not in _CONVERSIONS:
        known = ", ".join(f"{bits} bit {'float' if kind == _FLOAT else 'PCM'}" for kind, bits in _CONVERSIONS)
        raise PredictionException(
            f"The WAV file has the format {kind} of {bits} bit; there are {known}.", 400
        )
    if not 1 <= channels <= _MAX_CHANNELS or not _RATES[0] <= rate <= _RATES[1]:
        raise PredictionException(
            f"The WAV file has {channels} channels of {rate} samples per second; there are 1 to "
            f"{_MAX_CHANNELS} of {_RATES[0]} to {_RATES[1]}.",
            400,
        )
    return WaveFormat(kind, channels, rate, bits)


def _convert(data: memoryview, format: WaveFormat, max_seconds: float) -> np.ndarray:
    frame = format.channels * format.bits // 8
    frames = len(data) // frame
    if not frames:
        raise PredictionException("The WAV file has no samples.", 400)
    if frames > max_seconds * format.rate:
        raise PredictionException(
            f"The audio lasts {frames / format.rate:.0f} s, and at most {max_seconds:.0f} s are read: send "
            "it in parts.",
            413,
        )
    dtype, scale = _CONVERSIONS[format.kind, format.bits]
    content = data[: frames * frame]
    if format.bits == 24:  # the three bytes become the upper ones of four
        wide = np.zeros((frames * format.channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0]
    else:
        values = np.frombuffer(content, dtype)
    samples = values.astype(np.float32)
    if dtype == "u1":
        samples -= 128
    samples = samples.reshape(frames, format.channels).mean(axis=1) / np.float32(scale)
    if not (np.abs(samples) <= _MAX_SAMPLE).all():  # is false for NaN, too
        raise PredictionException(
            f"The WAV file has samples that are no finite numbers, or beyond {_MAX_SAMPLE}: they are from "
            "-1 to 1.",
            400,
        )
    return np.ascontiguousarray(samples, np.float32)


# (format, bits) -> numpy's type, and the value of full scale.
_CONVERSIONS: dict[tuple[int, int], tuple[str, float]] = {
    (_PCM, 8): ("u1", 2.0**7),
    (_PCM, 16): ("<i2", 2.0**15),
    (_PCM, 24): ("<i4", 2.0**31),
    (_PCM, 32): ("<i4", 2.0**31),
    (_FLOAT, 32): ("<f4", 1.0),
    (_FLOAT, 64): ("<f8", 1.0),
}


def _name_format(head: bytes) -> str:
    if head[4:8] == b"ftyp":
        return "MP4"
    return next(
        (name for magic, name in _OTHER_FORMATS.items() if head.startswith(magic)), "of no known format"
    )
