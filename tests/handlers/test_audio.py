"""The decoding of WAV files, and resampling."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest

from handlers import PredictionException
from handlers.audio import decode_wav, resample
from tests.support.whisper_folders import encode_wav, make_noise


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_encodings_are_decoded(kind: int, bits: int, extensible: bool) -> None:
    samples = make_noise(0.1)
    decoded, rate = decode_wav(encode_wav(samples, 8000, kind, bits, extensible), 10)
    assert (rate, decoded.dtype) == (8000, np.float32)
    assert decoded == pytest.approx(samples, abs=2.0 ** (2 - min(bits, 24)))


def test_channels_are_averaged() -> None:
    left, right = make_noise(0.1, seed=1), make_noise(0.1, seed=2)
    decoded, _ = decode_wav(encode_wav(np.stack([left, right], axis=1)), 10)
    assert decoded == pytest.approx((left + right) / 2, abs=1e-4)


def test_a_file_of_the_standard_library_is_read() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    assert decode_wav(file.getvalue(), 10)[0].tolist() == [0, 0.5, -1]


def test_a_stream_of_unknown_length_is_read() -> None:
    content = bytearray(encode_wav(make_noise(0.1)))
    position = content.index(b"data") + 4
    content[position : position + 4] = b"\xff\xff\xff\xff"
    assert len(decode_wav(content, 10)[0]) == 1600


def change(content: bytes, at: int, value: bytes) -> bytes:
    return content[:at] + value + content[at + len(value) :]


WAV = encode_wav(make_noise(0.1))
FORMAT = WAV.index(b"fmt ") + 8
OTHERS = {
    "MP3": b"ID3\x04",
    "FLAC": b"fLaC",
    "Ogg": b"OggS",
    "WebM": b"\x1a\x45\xdf\xa3",
    "MP4": b"\0\0\0\x18ftypM4A ",
}


@pytest.mark.parametrize(
    ("content", "reason", "code"),
    [
        *((start + bytes(40), f"The audio is {name}, and only WAV", 400) for name, start in OTHERS.items()),
        (b"", "of no known format", 400),
        (b"RIFF\0\0\0\0WAVE", "incomplete", 400),
        (WAV[: FORMAT + 4], "its format is cut off", 400),
        (WAV[: FORMAT + 16], "incomplete", 400),
        (encode_wav(np.zeros(0)), "no samples", 400),
        (change(WAV, FORMAT, struct.pack("<H", 7)), "the format 7 of 16 bit", 400),
        (change(WAV, FORMAT + 2, struct.pack("<H", 0)), "0 channels", 400),
        (change(WAV, FORMAT + 4, struct.pack("<I", 2**32 - 1)), "4294967295 samples", 400),
        (encode_wav(np.array([0, np.nan]), kind=3, bits=32), "no finite numbers", 400),
        (encode_wav(np.array([0, -1e30]), kind=3, bits=32), "beyond 2147483648", 400),
        (encode_wav(np.zeros(16001)), "at most 1 s are read", 413),
    ],
)
def test_other_content_is_rejected(content: bytes, reason: str, code: int) -> None:
    with pytest.raises(PredictionException) as error:
        decode_wav(content, 1)
    assert reason in error.value.message and error.value.error_code == code


def test_damaged_files_are_decoded_or_rejected() -> None:
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(2000):
        damaged = bytearray(encode_wav(make_noise(0.01), bits=int(random.choice([8, 16, 24, 32]))))
        for place in random.integers(4, 64, random.integers(1, 6)):
            damaged[place] = random.integers(256)
        try:
            samples, rate = decode_wav(damaged[: random.integers(20, len(damaged))], 1)
            outcomes.add(bool(np.isfinite(resample(samples, rate, 16000)).all()))
        except PredictionException as error:
            outcomes.add(error.message[:20])
    assert False not in outcomes and len(outcomes) > 4


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101])
@pytest.mark.parametrize("seconds", [0.37, 62])
def test_resampling_keeps_the_sound(rate: int, seconds: float) -> None:
    def tones(rate: int) -> Any:
        times = np.arange(int(seconds * rate)) / rate
        return (0.3 * np.sin(2 * np.pi * 440 * times) + 0.3 * np.sin(2 * np.pi * 1234 * times)).astype(
            np.float32
        )

    resampled, expected = resample(tones(rate), rate, 16000), tones(16000)
    assert abs(len(resampled) - len(expected)) <= 1
    inner = slice(400, min(len(resampled), len(expected)) - 400)
    difference = resampled[inner] - expected[inner]
    assert np.abs(difference).max() < 0.02 and np.sqrt(np.mean(difference**2)) < 0.002


def test_resampling_cuts_off_what_the_new_rate_cannot_have() -> None:
    times = np.arange(48000) / 48000
    assert (
        np.abs(resample(np.sin(2 * np.pi * 12000 * times).astype(np.float32), 48000, 16000)[400:-400]).max()
        < 0.01
    )
    samples = make_noise(0.1)
    assert resample(samples, 16000, 16000) is samples
