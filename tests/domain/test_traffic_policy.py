"""What operators may write of traffic, and how buckets change hands."""

from __future__ import annotations

import json
import pickle
from random import Random

import pytest

from serve_app.domain import validation
from serve_app.domain.traffic_policy import (
    BUCKET_COUNT,
    BucketAllocation,
    ShadowPolicy,
    StickyKey,
    TrafficPolicy,
    allocate,
    read,
    write,
)
from serve_app.errors import BadRequest, ConfigurationError
from serve_app.settings import load

HALVES = {"1.0": 5000, "2.0": 5000}


def owners(allocation: BucketAllocation) -> list[str]:
    return [allocation.owner_of(bucket) for bucket in range(BUCKET_COUNT)]


class TestAllocate:
    def test_buckets_are_dealt_out_in_the_order_of_the_weights(self):
        allocation = allocate({"a": 9000, "none": 0, "b": 1000})
        assert allocation == BucketAllocation((9000, 10_000), ("a", "b"))
        assert allocation.shares == {"a": 9000, "b": 1000}
        assert [allocation.owner_of(bucket) for bucket in (0, 8999, 9000, 9999)] == ["a", "a", "b", "b"]

    def test_one_takes_all(self):
        assert allocate({"a": BUCKET_COUNT}, before=allocate({"b": BUCKET_COUNT})) == BucketAllocation(
            (BUCKET_COUNT,), ("a",)
        )

    def test_between_two_a_border_moves_so_that_the_same_callers_come_back(self):
        allocation = allocate({"a": BUCKET_COUNT})
        for share in (1000, 500, 4000, 1000, 0, 1000, 9999, 2500):
            allocation = allocate({"b": share, "a": BUCKET_COUNT - share}, allocation)
            assert owners(allocation) == ["a"] * (BUCKET_COUNT - share) + ["b"] * share

    def test_among_three_neighbours_give_to_neighbours(self):
        before = BucketAllocation((3000, 6000, BUCKET_COUNT), ("a", "b", "c"))
        assert allocate({"a": 4000, "b": 1000, "c": 5000}, before) == BucketAllocation(
            (4000, 5000, BUCKET_COUNT), ("a", "b", "c")
        )
        assert allocate({"a": 5000, "c": 5000}, before) == BucketAllocation((5000, BUCKET_COUNT), ("a", "c"))

    def test_a_new_one_gets_the_ends_of_those_that_give(self):
        before = BucketAllocation((5000, BUCKET_COUNT), ("a", "b"))
        assert allocate({"a": 4000, "b": 4000, "c": 500, "d": 1500}, before) == BucketAllocation(
            (4000, 4500, 5000, 9000, BUCKET_COUNT), ("a", "c", "d", "b", "d")
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_of_whatever_came_before_as_few_as_possible_change_hands(self, seed):
        random = Random(seed)
        before = allocate({"a": BUCKET_COUNT})
        for _ in range(40):
            names = random.sample("abcdefgh", random.randint(1, 8))
            cuts = sorted(random.choices(range(BUCKET_COUNT + 1), k=len(names) - 1))
            weights = {
                n: end - start for n, start, end in zip(names, [0, *cuts], [*cuts, BUCKET_COUNT], strict=True)
            }
            after = allocate(weights, before)
            assert after.shares == {name: weight for name, weight in weights.items() if weight}
            had = before.shares
            moved = sum(a != b for a, b in zip(owners(before), owners(after), strict=True))
            assert moved == sum(max(0, weight - had.get(name, 0)) for name, weight in weights.items())
            before = after

    def test_the_same_weights_change_nothing(self):
        before = allocate({"a": 3000, "b": 7000}, before=allocate({"b": BUCKET_COUNT}))
        assert allocate({"b": 7000, "a": 3000}, before) == before


class TestRead:
    @pytest.mark.parametrize(
        ("document", "policy"),
        [
            ({}, TrafficPolicy()),
            ({"policy": "default"}, TrafficPolicy()),
            ({"policy": "weighted", "versions": HALVES}, TrafficPolicy("weighted", HALVES)),
            ({"versions": HALVES}, TrafficPolicy("weighted", HALVES)),
            (
                {"policy": "sticky", "key": {"header": "X-User"}, "versions": HALVES, "salt": "s"},
                TrafficPolicy("sticky", HALVES, StickyKey(header="x-user"), "s"),
            ),
            (
                {"key": {"cookie": "User"}, "versions": HALVES},
                TrafficPolicy("sticky", HALVES, StickyKey(cookie="User")),
            ),
            (
                {"key": {"json": "$.user.id"}, "versions": HALVES},
                TrafficPolicy("sticky", HALVES, StickyKey(json="$.user.id")),
            ),
            ({"header": "X-Model-Version"}, TrafficPolicy(header="x-model-version")),
            ({"labels": {"canary": "2.0"}}, TrafficPolicy(labels={"canary": "2.0"})),
            ({"shadow": {"version": "2.0", "percent": 10}}, TrafficPolicy(shadow=ShadowPolicy("2.0", 10))),
        ],
    )
    def test_what_operators_write(self, document, policy):
        assert read(document) == policy
        written = json.loads(json.dumps(write(policy)))
        assert read(written) == policy
        assert {key: written[key] for key in document if key not in ("key", "header", "shadow")} == {
            key: value for key, value in document.items() if key not in ("key", "header", "shadow")
        }

    def test_a_parsed_policy_can_be_written_again(self):
        assert read({"versions": HALVES, "active": {"by": "policy"}}) == read({"versions": HALVES})

    def test_the_document_has_only_the_fields_that_were_set(self):
        policy = read({"key": {"json": "user"}, "versions": HALVES})
        allocated = TrafficPolicy(policy.policy, policy.versions, policy.key, allocation=allocate(HALVES))
        assert write(allocated) == {"policy": "sticky", "versions": HALVES, "key": {"json": "user"}}
        assert write(TrafficPolicy()) == {"policy": "default"}

    @pytest.mark.parametrize(
        ("document", "result"),
        [
            ([], 'A traffic policy is a JSON object, such as {"policy": "default"}.'),
            ({"polcy": "default"}, "unknown key 'polcy'; did you mean 'policy'?"),
            ({"allocation": {}}, "unknown key 'allocation'; known here: policy, versions, key"),
            (
                {"policy": "random"},
                "policy: Input should be 'default', 'weighted' or 'sticky' (got 'random')",
            ),
            ({"policy": "default", "versions": HALVES}, 'the policy "default" has no versions'),
            ({"policy": "weighted"}, "versions (none) sum to 0 basis points; they must sum to 10000"),
            (
                {"versions": {"1.0": 9000, "2.0": 900}},
                "versions (1.0: 9000, 2.0: 900) sum to 9900 basis points",
            ),
            ({"versions": {"1.0": 11000, "2.0": -1000}}, "versions.2.0 is a share of -1000 basis points"),
            ({"versions": {"1.0": 0.9, "2.0": 0.1}}, "versions.1.0: Input should be a valid integer"),
            (
                {"versions": {1.0: BUCKET_COUNT}},
                "versions.1.0: Input should be a valid string; put it in quotes (got 1.0)",
            ),
            ({"policy": "sticky", "versions": HALVES}, 'the policy "sticky" wants a key: {"header": NAME}'),
            (
                {"policy": "weighted", "versions": HALVES, "key": {"header": "x"}},
                'a key is for the policy "sticky"',
            ),
            (
                {"versions": HALVES, "salt": "s"},
                "a salt is for the policy \"sticky\"; this one is 'weighted'",
            ),
            ({"versions": HALVES, "key": {}}, "key: a key is one of"),
            ({"versions": HALVES, "key": {"header": "a", "cookie": "b"}}, "key: a key is one of"),
            ({"versions": HALVES, "key": {"header": "a b"}}, "key: 'a b' is no name that a header"),
            ({"versions": HALVES, "key": {"json": "a["}}, "key: 'a[' is no place in a JSON document"),
            ({"header": "x:y"}, "'x:y' is no name that a header or a cookie can have"),
            (
                {"labels": {"canary": 2.0}},
                "labels.canary: Input should be a valid string; put it in quotes (got 2.0)",
            ),
            ({"shadow": {"percent": 10}}, "shadow.version: Field required"),
            ({"shadow": {"version": "2.0", "percent": 0}}, "shadow: percent is from 0.01 to 100, and is 0"),
            ({"shadow": {"version": "2.0", "percent": 101}}, "percent is from 0.01 to 100, and is 101"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_cure(self, document, result):
        with pytest.raises(BadRequest) as caught:
            read(document)
        assert result in str(caught.value)


class TestInTheSettings:
    def test_a_policy_by_model(self):
        result = {"m": {"versions": HALVES}, "n": {"labels": {"canary": "2.0"}}}
        assert load({"control": {"traffic": result}}).control.traffic == result

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (
                {"m": {"versions": {"1.0": 1}}},
                "app.yaml: control.traffic.m: Traffic policy: versions (1.0: 1) sum",
            ),
            (
                {"m": {"polcy": "default"}},
                "control.traffic.m: Traffic policy: unknown key 'polcy'; did you mean",
            ),
            (
                {"m": {"versions": {1.0: BUCKET_COUNT}}},
                "versions.1.0: Input should be a valid string; put it in quotes",
            ),
            ({"m": []}, "control.traffic.m: Input should be a valid dictionary"),
        ],
    )
    def test_a_wrong_one_stops_the_start_with_its_place(self, result, message):
        with pytest.raises(ConfigurationError) as caught:
            load({"control": {"traffic": result}}, "app.yaml")
        assert message in str(caught.value)


def test_a_policy_names_versions() -> None:
    policy = TrafficPolicy("weighted", HALVES, labels={"canary": "3.0"}, shadow=ShadowPolicy("4.0"))
    assert policy.referenced_versions == {"1.0", "2.0", "3.0", "4.0"}


def test_a_policy_crosses_processes_and_the_database() -> None:
    policy = TrafficPolicy("sticky", HALVES, StickyKey(header="X-User"), "s", allocation=allocate(HALVES))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert validation.read(TrafficPolicy, json.loads(json.dumps(validation.write(policy)))) == policy
