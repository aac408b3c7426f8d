"""What operators may write of traffic, and how buckets change hands."""

from __future__ import annotations

import json
import pickle
from random import Random

import pytest

from serve_app import documents
from serve_app.errors import BadRequest, ConfigurationError
from serve_app.policy import WHOLE, Allocation, Key, Policy, Shadow, allocate, read, write
from serve_app.settings import load

HALVES = {"1.0": 5000, "2.0": 5000}


def owners(allocation: Allocation) -> list[str]:
    return [allocation.of(bucket) for bucket in range(WHOLE)]


class TestAllocate:
    def test_buckets_are_dealt_out_in_the_order_of_the_weights(self):
        allocation = allocate({"a": 9000, "none": 0, "b": 1000})
        assert allocation == Allocation((9000, 10_000), ("a", "b"))
        assert allocation.shares == {"a": 9000, "b": 1000}
        assert [allocation.of(bucket) for bucket in (0, 8999, 9000, 9999)] == ["a", "a", "b", "b"]

    def test_one_takes_all(self):
        assert allocate({"a": WHOLE}, before=allocate({"b": WHOLE})) == Allocation((WHOLE,), ("a",))

    def test_between_two_a_border_moves_so_that_the_same_callers_come_back(self):
        allocation = allocate({"a": WHOLE})
        for share in (1000, 500, 4000, 1000, 0, 1000, 9999, 2500):
            allocation = allocate({"b": share, "a": WHOLE - share}, allocation)
            assert owners(allocation) == ["a"] * (WHOLE - share) + ["b"] * share

    def test_among_three_neighbours_give_to_neighbours(self):
        before = Allocation((3000, 6000, WHOLE), ("a", "b", "c"))
        assert allocate({"a": 4000, "b": 1000, "c": 5000}, before) == Allocation((4000, 5000, WHOLE), ("a", "b", "c"))
        assert allocate({"a": 5000, "c": 5000}, before) == Allocation((5000, WHOLE), ("a", "c"))

    def test_a_new_one_gets_the_ends_of_those_that_give(self):
        before = Allocation((5000, WHOLE), ("a", "b"))
        assert allocate({"a": 4000, "b": 4000, "c": 500, "d": 1500}, before) == Allocation(
            (4000, 4500, 5000, 9000, WHOLE), ("a", "c", "d", "b", "d")
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_of_whatever_came_before_as_few_as_possible_change_hands(self, seed):
        random = Random(seed)
        before = allocate({"a": WHOLE})
        for _ in range(40):
            names = random.sample("abcdefgh", random.randint(1, 8))
            cuts = sorted(random.choices(range(WHOLE + 1), k=len(names) - 1))
            weights = {n: end - start for n, start, end in zip(names, [0, *cuts], [*cuts, WHOLE], strict=True)}
            after = allocate(weights, before)
            assert after.shares == {name: weight for name, weight in weights.items() if weight}
            had = before.shares
            moved = sum(a != b for a, b in zip(owners(before), owners(after), strict=True))
            assert moved == sum(max(0, weight - had.get(name, 0)) for name, weight in weights.items())
            before = after

    def test_the_same_weights_change_nothing(self):
        before = allocate({"a": 3000, "b": 7000}, before=allocate({"b": WHOLE}))
        assert allocate({"b": 7000, "a": 3000}, before) == before


class TestRead:
    @pytest.mark.parametrize(
        ("document", "policy"),
        [
            ({}, Policy()),
            ({"policy": "default"}, Policy()),
            ({"policy": "weighted", "versions": HALVES}, Policy("weighted", HALVES)),
            ({"versions": HALVES}, Policy("weighted", HALVES)),
            (
                {"policy": "sticky", "key": {"header": "X-User"}, "versions": HALVES, "salt": "s"},
                Policy("sticky", HALVES, Key(header="x-user"), "s"),
            ),
            ({"key": {"cookie": "User"}, "versions": HALVES}, Policy("sticky", HALVES, Key(cookie="User"))),
            ({"key": {"json": "$.user.id"}, "versions": HALVES}, Policy("sticky", HALVES, Key(json="$.user.id"))),
            ({"header": "X-Model-Version"}, Policy(header="x-model-version")),
            ({"labels": {"canary": "2.0"}}, Policy(labels={"canary": "2.0"})),
            ({"shadow": {"version": "2.0", "percent": 10}}, Policy(shadow=Shadow("2.0", 10))),
        ],
    )
    def test_what_operators_write(self, document, policy):
        assert read(document) == policy
        written = json.loads(json.dumps(write(policy)))
        assert read(written) == policy
        assert {key: written[key] for key in document if key not in ("key", "header", "shadow")} == {
            key: value for key, value in document.items() if key not in ("key", "header", "shadow")
        }

    def test_what_is_read_can_be_written_again_with_what_is_said_beside_it(self):
        assert read({"versions": HALVES, "in_force": {"by": "policy"}}) == read({"versions": HALVES})

    def test_the_document_says_what_was_said_and_nothing_else(self):
        policy = read({"key": {"json": "user"}, "versions": HALVES})
        allocated = Policy(policy.policy, policy.versions, policy.key, allocation=allocate(HALVES))
        assert write(allocated) == {"policy": "sticky", "versions": HALVES, "key": {"json": "user"}}
        assert write(Policy()) == {"policy": "default"}

    @pytest.mark.parametrize(
        ("document", "said"),
        [
            ([], 'A traffic policy is a JSON object, such as {"policy": "default"}.'),
            ({"polcy": "default"}, "unknown key 'polcy'; did you mean 'policy'?"),
            ({"allocation": {}}, "unknown key 'allocation'; known here: policy, versions, key"),
            ({"policy": "random"}, "policy: Input should be 'default', 'weighted' or 'sticky' (got 'random')"),
            ({"policy": "default", "versions": HALVES}, 'the policy "default" has no versions'),
            ({"policy": "weighted"}, "versions (none) sum to 0 basis points; they must sum to 10000"),
            ({"versions": {"1.0": 9000, "2.0": 900}}, "versions (1.0: 9000, 2.0: 900) sum to 9900 basis points"),
            ({"versions": {"1.0": 11000, "2.0": -1000}}, "versions.2.0 is a share of -1000 basis points"),
            ({"versions": {"1.0": 0.9, "2.0": 0.1}}, "versions.1.0: Input should be a valid integer"),
            ({"versions": {1.0: WHOLE}}, "versions.1.0: Input should be a valid string; put it in quotes (got 1.0)"),
            ({"policy": "sticky", "versions": HALVES}, 'the policy "sticky" wants a key: {"header": NAME}'),
            ({"policy": "weighted", "versions": HALVES, "key": {"header": "x"}}, 'a key is for the policy "sticky"'),
            ({"versions": HALVES, "salt": "s"}, "a salt is for the policy \"sticky\"; this one is 'weighted'"),
            ({"versions": HALVES, "key": {}}, "key: a key is one of"),
            ({"versions": HALVES, "key": {"header": "a", "cookie": "b"}}, "key: a key is one of"),
            ({"versions": HALVES, "key": {"header": "a b"}}, "key: 'a b' is no name that a header"),
            ({"versions": HALVES, "key": {"json": "a["}}, "key: 'a[' is no place in a JSON document"),
            ({"header": "x:y"}, "'x:y' is no name that a header or a cookie can have"),
            ({"labels": {"canary": 2.0}}, "labels.canary: Input should be a valid string; put it in quotes (got 2.0)"),
            ({"shadow": {"percent": 10}}, "shadow.version: Field required"),
            ({"shadow": {"version": "2.0", "percent": 0}}, "shadow: percent is from 0.01 to 100, and is 0"),
            ({"shadow": {"version": "2.0", "percent": 101}}, "percent is from 0.01 to 100, and is 101"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_cure(self, document, said):
        with pytest.raises(BadRequest) as caught:
            read(document)
        assert said in str(caught.value)


class TestInTheSettings:
    def test_a_policy_by_model(self):
        said = {"m": {"versions": HALVES}, "n": {"labels": {"canary": "2.0"}}}
        assert load({"control": {"traffic": said}}).control.traffic == said

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ({"m": {"versions": {"1.0": 1}}}, "app.yaml: control.traffic.m: Traffic policy: versions (1.0: 1) sum"),
            ({"m": {"polcy": "default"}}, "control.traffic.m: Traffic policy: unknown key 'polcy'; did you mean"),
            ({"m": {"versions": {1.0: WHOLE}}}, "versions.1.0: Input should be a valid string; put it in quotes"),
            ({"m": []}, "control.traffic.m: Input should be a valid dictionary"),
        ],
    )
    def test_a_wrong_one_stops_the_start_with_its_place(self, said, message):
        with pytest.raises(ConfigurationError) as caught:
            load({"control": {"traffic": said}}, "app.yaml")
        assert message in str(caught.value)


def test_a_policy_names_versions() -> None:
    policy = Policy("weighted", HALVES, labels={"canary": "3.0"}, shadow=Shadow("4.0"))
    assert policy.named == {"1.0", "2.0", "3.0", "4.0"}


def test_a_policy_crosses_processes_and_the_database() -> None:
    policy = Policy("sticky", HALVES, Key(header="X-User"), "s", allocation=allocate(HALVES))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert documents.read(Policy, json.loads(json.dumps(documents.write(policy)))) == policy
