"""The names of sequences, and where they lead."""

from __future__ import annotations

from serve_app import sequence
from serve_app.policy import Allocation, Policy
from serve_app.traffic import choose
from serve_app.types import Call, ModelRow, Table, VersionRow

REPLICAS = tuple(f"replica{number}" for number in range(8))


def test_a_name_made_here_leads_to_its_replica_and_no_other_does() -> None:
    name = sequence.new("abcd1234")
    assert name.startswith("ts-seq-") and sequence.replica_of(name) == "abcd1234"
    assert name != sequence.new("abcd1234")
    torchserves = "ts-seq-5b7f1a40-27bd-4b0c-8b1b-5ef8f2d6a2a1"
    for own in ("", "seq-0", "17", "ts-seq-", "ts-seq-a-b", torchserves):
        assert sequence.replica_of(own) == ""


def test_a_replica_that_goes_moves_only_the_names_that_it_had() -> None:
    names = [f"own-{number}" for number in range(400)]
    before = {name: sequence.homes(name, REPLICAS) for name in names}
    assert before == {name: sequence.homes(name, reversed(REPLICAS)) for name in names}
    firsts = [homes[0] for homes in before.values()]
    assert all(20 < firsts.count(replica) < 90 for replica in REPLICAS), "they are dealt out evenly"
    gone, *rest = REPLICAS
    for name, homes in before.items():
        assert sequence.homes(name, rest)[0] == (homes[1] if homes[0] == gone else homes[0])


def two(**more) -> Table:
    rows = {v: VersionRow(v, "ready", 1, ids=(f"of{v}",), stateful=True) for v in ("1", "2")}
    halves = Policy("weighted", {"1": 5000, "2": 5000}, allocation=Allocation((5000, 10000), ("1", "2")))
    return Table(1, {"m": ModelRow("1", rows, halves, sequences="seq", **more)})


def test_a_split_keeps_a_sequence_with_its_version() -> None:
    table = two()
    for version in ("1", "2"):
        call = Call("m", headers={"seq": sequence.new(f"of{version}")})
        assert {choose(table, call, lot).row.version for lot in (0, 4999, 5000, 9999)} == {version}
    by_name = {choose(table, Call("m", headers={"seq": "mine"}), lot).row.version for lot in (0, 4999, 5000, 9999)}
    assert len(by_name) == 1
    named = Call("m", "2", headers={"seq": sequence.new("of1")})
    assert choose(table, named).row.version == "2", "who names a version is told there what became of the sequence"
    assert {choose(table, Call("m"), lot).row.version for lot in (0, 9999)} == {"1", "2"}
