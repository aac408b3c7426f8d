"""A version that does not fit the cluster gets an error with each machine's free resources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.control import placement_check
from serve_app.domain.model import ModelSpec
from tests.support.archives import ECHO, make_archive
from tests.support.control_server import serve_control

SPEC = ModelSpec("m", "1.0", "m.mar", "d" * 64, "file:///m.mar", "", "python", 1, 1, num_cpus=1, num_gpus=0.5)
TWO = {"10.0.0.1": {"CPU": 8.0, "GPU": 0.5}, "10.0.0.2": {"CPU": 8.0, "GPU": 0.5, "memory": 1.0}}
APART = {"10.0.0.1": {"CPU": 8.0}, "10.0.0.2": {"CPU": 0.2, "GPU": 1.0}}


@pytest.mark.parametrize(
    ("asks", "free", "kinds"),
    [
        ({}, TWO, []),
        ({"num_gpus": 0.6}, TWO, ["GPU"]),
        ({"tensor_parallel": 2}, TWO, ["GPU"]),
        ({"tensor_parallel": 2, "placement_strategy": "PACK"}, TWO, []),
        ({"tensor_parallel": 2, "placement_strategy": "STRICT_SPREAD"}, TWO, []),
        ({"tensor_parallel": 3, "placement_strategy": "SPREAD"}, TWO, ["GPU"]),
        ({"tensor_parallel": 3, "placement_strategy": "STRICT_SPREAD"}, TWO, ["CPU", "GPU"]),
        ({"tensor_parallel": 2, "pipeline_parallel": 8, "num_gpus": 0}, TWO, ["CPU"]),
        ({"num_cpus": 0, "num_gpus": 0}, {}, []),
        ({}, {}, ["CPU", "GPU"]),
        ({}, APART, ["CPU", "GPU"]),
        ({"num_gpus": 0, "num_cpus": 0.1, "tensor_parallel": 3}, {"a": {"CPU": 0.3}}, []),
        ({"num_gpus": 0, "num_cpus": 0.1, "tensor_parallel": 3}, {"a": {"CPU": 0.29}}, ["CPU"]),
    ],
)
def test_what_is_lacking_where(
    asks: dict[str, Any], free: dict[str, dict[str, float]], kinds: list[str]
) -> None:
    assert list(placement_check.find_missing(replace(SPEC, **asks), free)) == kinds


@pytest.mark.parametrize(
    ("asks", "free", "words"),
    [
        (
            {"tensor_parallel": 2},
            TWO,
            "a replica of 2 ranks, which requires 2 × 0.5 GPU on one machine; free: 10.0.0.1 0.5, "
            "10.0.0.2 0.5. "
            "Free resources, require less, or spread its ranks over machines by placement_strategy: PACK",
        ),
        (
            {"num_gpus": 0.75},
            TWO,
            "a replica, which requires 0.75 GPU on one machine; free: 10.0.0.1 0.5, 10.0.0.2 0.5. "
            "Free resources, add a node, or require less",
        ),
        (
            {"tensor_parallel": 3, "num_cpus": 0, "placement_strategy": "STRICT_SPREAD"},
            TWO,
            "a replica of 3 ranks, which requires 3 × 0.5 GPU on 3 machines; free: 10.0.0.1 0.5, "
            "10.0.0.2 0.5. "
            "Free resources, add a node, or require less",
        ),
        (
            {"tensor_parallel": 4, "placement_strategy": "PACK"},
            TWO,
            "a replica of 4 ranks, which requires 4 × 0.5 GPU; free: 10.0.0.1 0.5, 10.0.0.2 0.5. "
            "Free resources, add a node, or require less",
        ),
        (
            {},
            APART,
            "a replica, which requires 1 CPU on one machine; free: 10.0.0.1 8, 10.0.0.2 0.2 and 0.5 "
            "GPU on one "
            "machine; free: 10.0.0.2 1, 10.0.0.1 0. Free resources, add a node, or require less",
        ),
        (
            {"tensor_parallel": 2},
            {"10.0.0.1": {"CPU": 1.5}},
            "a replica of 2 ranks (2 CPU required, 1.5 free; 1 GPU required, 0 free). Free resources, "
            "add a node, or require less",
        ),
    ],
)
def test_in_words(asks: dict[str, Any], free: dict[str, dict[str, float]], words: str) -> None:
    spec = replace(SPEC, **asks)
    assert (
        placement_check.explain(spec, placement_check.find_missing(spec, free))
        == f"the cluster lacks resources for {words}"
    )


GIB = 1 << 30
NODES = {"10.0.0.1": {"CPU": 8.0, "memory": 4.0 * GIB}, "10.0.0.2": {"CPU": 8.0, "memory": 2.5 * GIB}}
LARGE = ModelSpec("m", "1.0", "m.mar", "d" * 64, "file:///m.mar", max_workers=1, archive_bytes=8 * GIB)


def test_a_replica_that_no_machine_can_hold_is_named_with_the_amounts_of_each() -> None:
    impossible = placement_check.find_impossible(LARGE, NODES, {})
    assert placement_check.explain_impossible(LARGE, impossible) == (
        "No node of the cluster can hold a replica of m 1.0, which requires 8 GiB memory "
        "(10.0.0.1 has 4 GiB, 10.0.0.2 has 2.5 GiB). "
        "Require less, or add a larger node; nodes that an autoscaler adds are declared in control.node_types"
    )
    ranks = LARGE.with_(tensor_parallel=2, memory=3 * GIB)
    text = placement_check.explain_impossible(ranks, placement_check.find_impossible(ranks, NODES, {}))
    assert "requires 2 × 3 GiB memory (10.0.0.1 has 4 GiB, 10.0.0.2 has 2.5 GiB)" in text


def test_a_measurement_replaces_the_size_of_the_archive() -> None:
    assert placement_check.find_impossible(LARGE.with_(memory=3 * GIB), NODES, {}) == {}
    assert placement_check.find_impossible(LARGE.with_(archive_bytes=0), NODES, {}) == {}


def test_a_node_type_of_the_autoscaler_holds_what_no_machine_does() -> None:
    types = {"small": {"CPU": 2.0, "memory": 1.0 * GIB}, "large": {"CPU": 16.0, "memory": 64.0 * GIB}}
    assert placement_check.find_impossible(LARGE, NODES, types) == {}
    assert placement_check.find_node_type(LARGE, types) == "large"
    spread = LARGE.with_(tensor_parallel=16, placement_strategy="SPREAD")
    assert placement_check.find_impossible(spread, NODES, types) == {}
    packed = LARGE.with_(tensor_parallel=16)
    [memory] = placement_check.find_impossible(packed, NODES, types).values()
    assert memory["machines"]["node type large"] == 64 * GIB
    text = placement_check.explain(LARGE, placement_check.find_missing(LARGE, NODES), "large")
    assert "requires 8 GiB memory on one machine; free: 10.0.0.1 4 GiB, 10.0.0.2 2.5 GiB" in text
    assert text.endswith("; the node autoscaler adds a node of type large")


def test_more_replicas_than_the_cluster_holds_are_refused_with_their_number() -> None:
    small = LARGE.with_(archive_bytes=0)  # 16 of 256 MiB on one machine, 10 on the other
    fits = small.with_(min_workers=26 + placement_check.MARGIN, max_workers=1_000)
    assert not placement_check.exceeds_cluster(fits, NODES, {})
    excess = fits.with_(min_workers=1_000)
    assert placement_check.exceeds_cluster(excess, NODES, {})
    assert placement_check.explain_excess(excess, NODES) == (
        "1,000 replicas of m 1.0 are required, and the cluster can hold 26 of them, each with 256 MiB "
        "memory. Require no more than these, or add nodes; nodes that an autoscaler adds are declared in "
        "control.node_types"
    )
    assert not placement_check.exceeds_cluster(excess, NODES, {"any": {"CPU": 1.0, "memory": 1.0 * GIB}})
    sharded = excess.with_(tensor_parallel=2, num_cpus=1.0, memory=GIB)
    text = placement_check.explain_excess(sharded, NODES)
    assert "can hold 3 of them, each with 2 × 1 CPU and 1 GiB memory." in text


@pytest.mark.integration
@pytest.mark.parametrize("node_types", [{}, {"any": {"CPU": 2.0, "memory": 2.0**34}}])
def test_far_too_many_workers_are_refused_unless_nodes_are_added(
    tmp_path: Path, node_types: dict[str, Any]
) -> None:
    with (
        serve_control(tmp_path, node_types=node_types) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        make_archive(server.store, "m", ECHO)

        def register(workers: int) -> httpx.Response:
            return client.post("/models", params={"url": "m-1.0.mar", "initial_workers": workers})

        if node_types:
            assert register(1000).is_success
            return
        refused = register(1000)
        assert refused.status_code == 409, refused.text
        assert "1,000 replicas of m 1.0 are required, and the cluster can hold 64 of them" in refused.text
        assert client.get("/models/m").status_code == 404
        assert register(72).is_success, "the margin"
        assert client.put("/models/m", params={"min_worker": 73}).status_code == 409
        assert client.get("/models/m").json()[0]["minWorkers"] == 72
        scaled = client.put("/models/m", params={"min_worker": 1, "max_worker": 1000})
        assert scaled.is_success, "an upper bound"


def test_of_many_machines_those_with_most_free_are_named() -> None:
    free = {f"10.0.0.{number}": {"GPU": number / 100} for number in range(20)}
    spec = replace(SPEC, num_cpus=0)
    reported = placement_check.find_missing(spec, free)["GPU"]
    assert (next(iter(reported["machines"])), len(reported["machines"]), reported["more"]) == (
        "10.0.0.19",
        8,
        12,
    )
    assert (reported["wanted"], reported["free"]) == (0.5, pytest.approx(1.9))
    assert "10.0.0.12 0.12, and no more on 12 others." in placement_check.explain(spec, {"GPU": reported})
