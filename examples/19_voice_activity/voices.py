"""Synthetic recordings: glottal pulses through the resonances of five vowels, with quiet noise."""

import numpy as np

RATE = 16_000
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # Hz
WIDTHS = (80, 90, 120)  # of the resonances, Hz
SYLLABLE = RATE // 5


def resonance(frequency, width):
    """Return the audible part of a resonator's impulse response."""
    steps = np.arange(600)
    angle = 2 * np.pi * frequency / RATE
    return np.exp(-np.pi * width / RATE * steps) * np.sin((steps + 1) * angle) / np.sin(angle)


def voice(seconds, pitch):
    """Return samples from -0.5 to 0.5 of meaningless syllables at about ``pitch`` Hz."""
    time = np.arange(int(seconds * RATE)) / RATE
    melody = pitch * (1 + 0.15 * np.sin(2 * np.pi * 0.7 * time) + 0.04 * np.sin(2 * np.pi * 5 * time))
    pulses = np.diff(np.floor(np.cumsum(melody) / RATE), prepend=0.0)  # 1 at each pulse
    samples = np.zeros(len(time))
    for number, start in enumerate(range(0, len(time), SYLLABLE)):
        part = pulses[start : start + SYLLABLE]
        length = len(part)
        for frequency, width in zip(VOWELS[number % len(VOWELS)], WIDTHS):
            part = np.convolve(part, resonance(frequency, width))[:length]
        envelope = np.sqrt(np.sin(np.pi * np.arange(length) / SYLLABLE).clip(0))
        samples[start : start + length] = part / np.abs(part).max() * envelope
    return samples / 2


def recording(seconds, turns, pitch, seed):
    """Return 16-bit samples with speech during ``turns``, pairs of seconds."""
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) / 1000
    for start, end in turns:
        speech = voice(end - start, pitch)
        offset = int(start * RATE)
        samples[offset : offset + len(speech)] += speech
    return (samples * 32767).astype(np.int16)
