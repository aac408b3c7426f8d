"""The names of sequences, and where they lead."""

from __future__ import annotations

from serve_app.dataplane.routing.version_router import select_version
from serve_app.domain import sequence_ids
from serve_app.domain.rendezvous import rank_replicas
from serve_app.domain.request import InferenceRequest
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import BucketAllocation, TrafficPolicy

REPLICAS = tuple(f"replica{number}" for number in range(8))


def test_a_name_made_here_leads_to_its_replica_and_no_other_does() -> None:
    name = sequence_ids.new_sequence_id("abcd1234")
    assert name.startswith("ts-seq-") and sequence_ids.replica_of(name) == "abcd1234"
    assert name != sequence_ids.new_sequence_id("abcd1234")
    torchserves = "ts-seq-5b7f1a40-27bd-4b0c-8b1b-5ef8f2d6a2a1"
    for own in ("", "seq-0", "17", "ts-seq-", "ts-seq-a-b", torchserves):
        assert sequence_ids.replica_of(own) == ""


def test_a_replica_that_goes_moves_only_the_names_that_it_had() -> None:
    names = [f"own-{number}" for number in range(400)]
    before = {name: rank_replicas(name, REPLICAS) for name in names}
    assert before == {name: rank_replicas(name, reversed(REPLICAS)) for name in names}
    firsts = [homes[0] for homes in before.values()]
    assert all(20 < firsts.count(replica) < 90 for replica in REPLICAS), "they are dealt out evenly"
    gone, *rest = REPLICAS
    for name, homes in before.items():
        assert rank_replicas(name, rest)[0] == (homes[1] if homes[0] == gone else homes[0])


def two(**more) -> RoutingTable:
    rows = {v: VersionRoute(v, "ready", 1, replica_ids=(f"of{v}",), stateful=True) for v in ("1", "2")}
    halves = TrafficPolicy(
        "weighted", {"1": 5000, "2": 5000}, allocation=BucketAllocation((5000, 10000), ("1", "2"))
    )
    return RoutingTable(1, {"m": ModelRoute("1", rows, halves, sequence_header="seq", **more)})


def test_a_split_keeps_a_sequence_with_its_version() -> None:
    table = two()
    for version in ("1", "2"):
        call = InferenceRequest("m", headers={"seq": sequence_ids.new_sequence_id(f"of{version}")})
        assert {select_version(table, call, lot).route.version for lot in (0, 4999, 5000, 9999)} == {version}
    by_name = {
        select_version(table, InferenceRequest("m", headers={"seq": "mine"}), lot).route.version
        for lot in (0, 4999, 5000, 9999)
    }
    assert len(by_name) == 1
    named = InferenceRequest("m", "2", headers={"seq": sequence_ids.new_sequence_id("of1")})
    assert select_version(table, named).route.version == "2", (
        "who names a version is told there what became of the sequence"
    )
    assert {select_version(table, InferenceRequest("m"), lot).route.version for lot in (0, 9999)} == {
        "1",
        "2",
    }
