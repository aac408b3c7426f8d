"""Who goes first."""

from dataclasses import dataclass

import pytest

from serve_app.domain.request import InferenceRequest
from serve_app.runtime.batching.request_queue import PRIORITY_AGING_S, RequestQueue


@dataclass(eq=False)
class Row:
    name: str
    request: InferenceRequest
    arrived: float


def row(name, arrived=0.0, priority="normal", kind="predict"):
    return Row(name, InferenceRequest("m", priority=priority, kind=kind), arrived)


def queue(*rows):
    made = RequestQueue()
    for each in rows:
        made.put(each)
    return made


def order(made):
    return [made.pop().name for _ in range(made.live)]


def test_rows_of_one_priority_go_as_they_came():
    assert order(queue(row("a", 1), row("b", 2), row("c", 3))) == ["a", "b", "c"]


def test_urgent_rows_overtake_and_low_ones_let_others_go():
    assert order(queue(row("low", 1, "low"), row("normal", 1.1), row("high", 1.2, "high"))) == [
        "high",
        "normal",
        "low",
    ]


@pytest.mark.parametrize(("patient", "urgent"), [("normal", "high"), ("low", "normal"), ("low", "high")])
def test_nobody_waits_for_ever(patient, urgent):
    lead = PRIORITY_AGING_S[patient] - PRIORITY_AGING_S[urgent]
    assert order(queue(row("patient", 0, patient), row("urgent", lead - 0.01, urgent))) == [
        "urgent",
        "patient",
    ]
    assert order(queue(row("patient", 0, patient), row("urgent", lead + 0.01, urgent))) == [
        "patient",
        "urgent",
    ]


def test_a_batch_has_one_kind_and_takes_the_most_urgent_rows():
    made = queue(row("a"), row("b", 0.1), row("x", 0.2, kind="explain"), row("h", 0.3, "high"), row("c", 0.4))
    assert [r.name for r in made.take(2)] == ["h", "a"]
    assert [r.name for r in made.take(8)] == ["b"]
    assert made.has_mixed_kinds()
    assert [r.name for r in made.take(8)] == ["x"]
    assert not made.has_mixed_kinds()
    assert [r.name for r in made.take(8)] == ["c"]
    assert made.live == 0 and made.take(8) == []


def test_shadows_stand_apart():
    made = queue(row("s", 0, "shadow"), row("a", 1), row("t", 2, "shadow"), row("e", 3, "shadow", "explain"))
    assert made.live == 1 and order(made) == ["a"]
    assert [r.name for r in made.take_shadows(8)] == ["s", "t"]
    assert [r.name for r in made.take_shadows(8)] == ["e"]


def test_the_newest_of_the_least_urgent_makes_room():
    made = queue(row("l1", 0, "low"), row("n1", 1), row("l2", 2, "low"), row("n2", 3), row("h", 4, "high"))
    gone = []
    while (lowest := made.newest_below("high")) is not None:
        assert made.remove(lowest)
        gone.append(lowest.name)
    assert gone == ["l2", "l1", "n2", "n1"]
    assert made.live == 1
    assert queue(row("n")).newest_below("normal") is None
    assert queue(row("l", 0, "low")).newest_below("low") is None
    assert queue(row("h", 0, "high")).newest_below("low") is None


def test_what_left_is_not_counted_and_what_came_back_is_first():
    a, b, shadow = row("a"), row("b", 1), row("s", 2, "shadow")
    made = queue(a, b, shadow)
    assert made.remove(a) and not made.remove(a)
    assert made.remove(shadow) and not made.remove(shadow)
    assert made.live == 1
    made.put_back(a)
    made.put_back(shadow)
    assert (made.peek(), made.oldest_arrival(), made.live) == (a, 0.0, 2)
    assert made.clear() == [a, b, shadow]
    assert made.live == 0 and not made.shadows and made.clear() == []


def test_who_is_before_a_new_row():
    made = queue(row("n"), row("l", 0, "low"), row("h", 0, "high"), row("s", 0, "shadow"), row("n"))
    assert [made.count_before(priority) for priority in ("high", "normal", "low")] == [1, 3, 4]
    assert [queue(row("n"), row("n")).count_before(priority) for priority in ("high", "normal", "low")] == [
        0,
        2,
        2,
    ]
