"""Recordings that are made here: pulses of a throat through the resonances of five vowels, on a quiet noise."""

import numpy as np

RATE = 16_000
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # Hz
WIDTHS = (80, 90, 120)  # of the resonances, Hz
SYLLABLE = RATE // 5


def resonance(pitch, width):
    """The impulse response of a resonator, as far as it can be heard."""
    steps = np.arange(600)
    angle = 2 * np.pi * pitch / RATE
    return np.exp(-np.pi * width / RATE * steps) * np.sin((steps + 1) * angle) / np.sin(angle)


def voice(seconds, pitch):
    """Syllables without a word, at about ``pitch`` Hz; samples of -0.5 to 0.5."""
    time = np.arange(int(seconds * RATE)) / RATE
    melody = pitch * (1 + 0.15 * np.sin(2 * np.pi * 0.7 * time) + 0.04 * np.sin(2 * np.pi * 5 * time))
    throat = np.diff(np.floor(np.cumsum(melody) / RATE), prepend=0.0)  # one where it opens
    said = np.zeros(len(time))
    for number, start in enumerate(range(0, len(time), SYLLABLE)):
        part = throat[start : start + SYLLABLE]
        length = len(part)
        for pitch_, width in zip(VOWELS[number % len(VOWELS)], WIDTHS):
            part = np.convolve(part, resonance(pitch_, width))[:length]
        loud = np.sqrt(np.sin(np.pi * np.arange(length) / SYLLABLE).clip(0))
        said[start : start + length] = part / np.abs(part).max() * loud
    return said / 2


def recording(seconds, turns, pitch, seed):
    """16-bit samples in which somebody speaks during ``turns``, pairs of seconds."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) / 1000
    for start, end in turns:
        said = voice(end - start, pitch)
        at = int(start * RATE)
        noise[at : at + len(said)] += said
    return (noise * 32767).astype(np.int16)
