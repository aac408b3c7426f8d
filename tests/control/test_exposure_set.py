"""Keys by the million, the oldest of which are forgotten."""

from __future__ import annotations

import random

import pytest

from serve_app.control.exposure_set import ExposureSet, hash_texts


def stored(exposures: ExposureSet, parts: dict[int, bytes]) -> dict[int, bytes]:
    """Return the stored segments after the changes of ``exposures``."""
    for number, part in exposures.changed.items():
        if part is None:
            parts.pop(number, None)
        else:
            parts[number] = part
    exposures.changed.clear()
    return parts


def test_what_was_added_is_found_with_its_number_and_nothing_else() -> None:
    exposures = ExposureSet(1000)
    exposures.add({})
    assert (len(exposures), exposures.find([1]), exposures.changed) == (0, {}, {})
    exposures.add({7: 1, 2**64 - 1: 2**32 - 1, 0: 3})
    exposures.add({5: 4})
    assert exposures.find([0, 5, 5, 6, 7, 8, 2**64 - 1]) == {0: 3, 5: 4, 7: 1, 2**64 - 1: 2**32 - 1}
    assert exposures.find([]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_mapping_that_forgets_the_oldest(seed: int) -> None:
    chance = random.Random(seed)
    keep = chance.choice([1, 10, 500, 5000])
    exposures, parts, model = ExposureSet(keep), {}, {}
    for _ in range(200):
        new = {chance.getrandbits(64): chance.getrandbits(32) for _ in range(chance.choice([1, 1, 1, 3, 50]))}
        exposures.add(new)
        model.update(new)
        parts = stored(exposures, parts)
        if chance.random() < 0.1:
            exposures = ExposureSet(keep, parts)
    everything = list(model)
    kept = everything[-len(exposures) :]
    assert exposures.find(everything) == {k: model[k] for k in kept}
    assert min(keep, len(everything)) <= len(exposures) <= keep + max(50, keep // 16)
    again = ExposureSet(keep, parts)
    assert again.find(everything) == exposures.find(everything)


def test_parts_are_few_and_little_is_written() -> None:
    exposures, parts, written = ExposureSet(100_000), {}, 0
    for n in range(20_000):
        exposures.add({hash_texts(str(n)): n})
        written += sum(len(part) for part in exposures.changed.values() if part is not None)
        parts = stored(exposures, parts)
    assert len(exposures) == 20_000
    assert len(parts) < 20
    assert written < 20 * 12 * 20_000
    assert exposures.find([hash_texts("0"), hash_texts("19999"), hash_texts("x")]) == {
        hash_texts("0"): 0,
        hash_texts("19999"): 19999,
    }


def test_a_key_is_of_all_its_texts() -> None:
    keys = {
        hash_texts("a", "b"),
        hash_texts("ab"),
        hash_texts("a"),
        hash_texts(""),
        hash_texts("", ""),
        hash_texts("\ud800"),
        hash_texts("ü"),
        hash_texts("b", "a"),
    }
    assert len(keys) == 8
    assert hash_texts("a", "b") == hash_texts("a", "b") < 2**64
