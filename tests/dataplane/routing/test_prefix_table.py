"""Tests of the choice of a replica by a request's beginning."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from serve_app.dataplane.routing.prefix_table import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_EXTRA_REQUESTS,
    PrefixTable,
    hash_blocks,
    read_prefix,
)
from serve_app.domain.request import InferenceRequest, InputPart

IDLE = {"a": 0, "b": 0, "c": 0}


def blocks(*texts: str) -> list[bytes]:
    """Return the blocks of a prefix in which each text fills one block."""
    return hash_blocks(b"".join(text.encode().ljust(BLOCK_BYTES) for text in texts))


def test_a_prefix_returns_to_its_replica() -> None:
    table = PrefixTable()
    homes = {name: table.choose(blocks(name), IDLE) for name in map(str, range(30))}
    assert set(homes.values()) == {"a", "b", "c"}
    for name, home in homes.items():
        assert table.choose(blocks(name, "question"), dict.fromkeys(IDLE, 3) | {home: 5}) == home


def test_gateways_choose_the_same_replica_at_equal_load() -> None:
    choices = [[PrefixTable().choose(blocks(str(name)), IDLE) for name in range(20)] for _ in range(2)]
    assert choices[0] == choices[1]
    more = [PrefixTable().choose(blocks(str(name)), {**IDLE, "d": 0}) for name in range(20)]
    assert {new for old, new in zip(choices[0], more, strict=True) if new != old} == {"d"}


def test_unknown_prefixes_go_to_the_least_busy_replica() -> None:
    load: Counter[str] = Counter(IDLE)
    table = PrefixTable()
    for name in range(30):
        load[table.choose(blocks(str(name)), load)] += 1
    assert load == {"a": 10, "b": 10, "c": 10}
    assert table.choose([], {"a": 1, "b": 0, "c": 1}) == "b", "a prompt of less than a block"


@pytest.mark.parametrize(("least", "extra"), [(0, MAX_EXTRA_REQUESTS), (20, 8), (100, 25)])
def test_the_load_of_a_prefix_is_bounded(least: int, extra: int) -> None:
    table = PrefixTable()
    home = table.choose(blocks("hot"), IDLE)
    load = dict.fromkeys(IDLE, least)
    assert table.choose(blocks("hot"), load | {home: least + extra}) == home
    second = table.choose(blocks("hot"), load | {home: least + extra + 1})
    assert second != home
    assert table.choose(blocks("hot"), load | {home: 999}) == second, "which has the prefix now"
    assert table.choose(blocks("hot"), load | {home: 999, second: 999}) not in (home, second)


def test_the_longest_prefix_selects_among_replicas() -> None:
    table = PrefixTable()
    first = table.choose(blocks("system"), IDLE)
    second = table.choose(blocks("system", "conversation"), {**IDLE, first: 99})
    assert second != first
    assert table.choose(blocks("system", "conversation", "turn"), {**IDLE, second: 4}) == second
    assert table.choose(blocks("system", "another"), {**IDLE, second: 99}) == first


def test_prefixes_of_a_lost_replica_go_to_another() -> None:
    table = PrefixTable()
    home = table.choose(blocks("prefix", "more"), IDLE)
    rest = {replica: 0 for replica in IDLE if replica != home}
    new = table.choose(blocks("prefix", "more"), rest)
    assert new in rest
    assert table.choose(blocks("prefix"), {**IDLE, "d": 0}) == new, "also when others start"


def test_the_least_recently_used_prefixes_are_forgotten() -> None:
    table = PrefixTable(max_entries=4)
    old, new = blocks("old", "its end"), blocks("new", "its end")
    busy: dict[str, int] = {"a": 0, "b": 1}
    assert [table.choose(prefix, busy) for prefix in (old, new)] == ["a", "a"]
    busy = {"a": 1, "b": 0}
    assert table.choose(old, busy) == "a"
    table.choose(blocks("third"), busy)  # in place of the end of "new"
    assert table.choose(new, busy) == "a"
    for name in "4567":
        table.choose(blocks(name), busy)
    assert table.choose(old, busy) == "b"


def test_blocks_are_hashed_with_all_before_them() -> None:
    prefix = bytes(range(256)) * 3
    assert len(hash_blocks(prefix[:-1])) == 2
    assert hash_blocks(prefix)[:2] == hash_blocks(prefix[:600])
    assert len({*hash_blocks(prefix), *hash_blocks(b"x" + prefix[1:])}) == 6
    assert len(hash_blocks(bytes(MAX_BLOCKS * BLOCK_BYTES + 1000))) == MAX_BLOCKS
    assert hash_blocks(b"") == []


def request(body: Any, name: str = "body") -> InferenceRequest:
    value = body if isinstance(body, bytes) else json.dumps(body).encode()
    return InferenceRequest("m", inputs=(InputPart(name, value, "application/json"),))


def shared(first: Any, second: Any) -> int:
    """Return how many first blocks two bodies have in common."""
    pairs = zip(*(hash_blocks(read_prefix(request(body))) for body in (first, second)))
    return sum(one == other for one, other in pairs)


TEXT = "You are a patient teacher of mathematics. " * 20


def test_requests_with_one_beginning_share_blocks_whatever_their_other_fields() -> None:
    system = {"role": "system", "content": TEXT}
    first = {"model": "m", "messages": [system, {"role": "user", "content": "1?"}], "temperature": 0}
    second = {"stream": True, "messages": [system, {"role": "user", "content": "2?"}], "model": "m"}
    assert shared(first, second) == len(TEXT) // BLOCK_BYTES
    assert shared(first, {**second, "model": "m:adapter"}) == 0
    assert shared(first, {**second, "tools": [{"type": "function"}]}) == 0
    answer = {"role": "assistant", "content": TEXT}
    turns = {**first, "messages": [*first["messages"], answer]}
    assert shared(turns, {**turns, "messages": [*turns["messages"], system]}) == 6
    for key in ("prompt", "inputs"):
        assert shared({key: TEXT + "1"}, {"max_new_tokens": 7, key: TEXT + "2"}) == 3
    assert shared({"prompt": list(range(300))}, {"prompt": [*range(300), 7]}) == 4
    assert shared(TEXT.encode() + b"1", TEXT.encode() + b"2") == 3


def test_invalid_and_huge_bodies_are_compared_as_bytes() -> None:
    for body in (b"{" + TEXT.encode(), b'{"prompt": "' + b"x" * (2 << 20) + b'"}', b"[1, 2]", b""):
        assert read_prefix(request(body)) == body
    assert read_prefix(InferenceRequest("m")) == b""
    form = (InputPart("max_new_tokens", b"3"), InputPart("prompt", TEXT.encode()))
    assert read_prefix(InferenceRequest("m", inputs=form)) == TEXT.encode()
