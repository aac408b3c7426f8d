"""Keys by the million, the oldest of which are forgotten."""

from __future__ import annotations

import random

import pytest

from serve_app.control.roll import Roll, key


def stored(roll: Roll, parts: dict[int, bytes]) -> dict[int, bytes]:
    """What a database has after the roll's changes."""
    for number, part in roll.changed.items():
        if part is None:
            parts.pop(number, None)
        else:
            parts[number] = part
    roll.changed.clear()
    return parts


def test_what_was_added_is_found_with_its_number_and_nothing_else() -> None:
    roll = Roll(1000)
    roll.add({})
    assert (len(roll), roll.find([1]), roll.changed) == (0, {}, {})
    roll.add({7: 1, 2**64 - 1: 2**32 - 1, 0: 3})
    roll.add({5: 4})
    assert roll.find([0, 5, 5, 6, 7, 8, 2**64 - 1]) == {0: 3, 5: 4, 7: 1, 2**64 - 1: 2**32 - 1}
    assert roll.find([]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_mapping_that_forgets_the_oldest(seed: int) -> None:
    chance = random.Random(seed)
    keep = chance.choice([1, 10, 500, 5000])
    roll, parts, model = Roll(keep), {}, {}
    for _ in range(200):
        new = {chance.getrandbits(64): chance.getrandbits(32) for _ in range(chance.choice([1, 1, 1, 3, 50]))}
        roll.add(new)
        model.update(new)
        parts = stored(roll, parts)
        if chance.random() < 0.1:
            roll = Roll(keep, parts)
    everything = list(model)
    kept = everything[-len(roll) :]
    assert roll.find(everything) == {k: model[k] for k in kept}
    assert min(keep, len(everything)) <= len(roll) <= keep + max(50, keep // 16)
    again = Roll(keep, parts)
    assert again.find(everything) == roll.find(everything)


def test_parts_are_few_and_little_is_written() -> None:
    roll, parts, written = Roll(100_000), {}, 0
    for n in range(20_000):
        roll.add({key(str(n)): n})
        written += sum(len(part) for part in roll.changed.values() if part is not None)
        parts = stored(roll, parts)
    assert len(roll) == 20_000
    assert len(parts) < 20
    assert written < 20 * 12 * 20_000
    assert roll.find([key("0"), key("19999"), key("x")]) == {key("0"): 0, key("19999"): 19999}


def test_a_key_is_of_all_its_texts() -> None:
    keys = {key("a", "b"), key("ab"), key("a"), key(""), key("", ""), key("\ud800"), key("ü"), key("b", "a")}
    assert len(keys) == 8
    assert key("a", "b") == key("a", "b") < 2**64
