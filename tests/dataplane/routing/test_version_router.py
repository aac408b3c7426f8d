"""Which version a call gets: every branch, and that shares are met."""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random

import pytest

from serve_app.dataplane.routing import version_router
from serve_app.dataplane.routing.version_router import (
    bucket_of_key,
    extract_unit,
    next_bucket_cursor,
    select_version,
    sole_version,
)
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import (
    BUCKET_COUNT,
    ActiveSplit,
    ShadowPolicy,
    StickyKey,
    TrafficPolicy,
    allocate,
)
from serve_app.errors import ModelNotFound, VersionNotFound

pytestmark = pytest.mark.integration


NINETY_TEN = {"1.0": 9000, "2.0": 1000}


DEFAULT = TrafficPolicy()


def table(
    policy: TrafficPolicy = DEFAULT,
    trial: ActiveSplit | None = None,
    versions: tuple[str, ...] = ("1.0", "2.0"),
) -> RoutingTable:
    rows = {version: VersionRoute(version, "ready", 1) for version in versions}
    return RoutingTable(1, {"m": ModelRoute("1.0", rows, policy, trial)})


def weighted(weights: dict[str, int] = NINETY_TEN, **more) -> TrafficPolicy:
    return TrafficPolicy("weighted", weights, allocation=allocate(weights), **more)


def sticky(key: StickyKey, weights: dict[str, int] = NINETY_TEN, salt: str = "") -> TrafficPolicy:
    return TrafficPolicy("sticky", weights, key, salt, allocation=allocate(weights))


def trial_of(key: StickyKey | None = None, **more) -> ActiveSplit:
    return ActiveSplit(
        "t", {"a": "1.0", "b": "2.0"}, allocate({"a": 5000, "b": 5000}), "a", key, "salt", **more
    )


def lots(start: int, count: int, every: int = 1) -> list[int]:
    """Return the bucket cursors of every n-th request of a process."""
    found = []
    lot = start
    for i in range(count * every):
        lot = next_bucket_cursor(lot)
        if i % every == 0:
            found.append(lot)
    return found


def answers(policy: TrafficPolicy, calls: list[tuple[InferenceRequest, int]]) -> Counter[str]:
    rows = table(policy)
    return Counter(select_version(rows, call, lot).route.version for call, lot in calls)


class TestDefault:
    def test_a_call_that_names_no_version_gets_the_default_one(self):
        assert select_version(table(), InferenceRequest("m")) == version_router.VersionSelection(
            VersionRoute("1.0", "ready", 1), routed_by_policy=True
        )

    def test_a_call_that_names_one_gets_it_whatever_the_policy(self):
        for policy in (TrafficPolicy(), weighted(), TrafficPolicy(header="x-v", labels={"x": "1.0"})):
            choice = select_version(table(policy), InferenceRequest("m", "2.0", headers={"x-v": "1.0"}))
            assert (choice.route.version, choice.routed_by_policy) == ("2.0", False)

    def test_an_empty_version_is_none(self):
        assert select_version(table(), InferenceRequest("m", "")).route.version == "1.0"

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound, match=r"^Model not found: n$"):
            select_version(table(), InferenceRequest("n"))
        with pytest.raises(VersionNotFound, match=r"^Model version: 9 does not exist for model: m$"):
            select_version(table(), InferenceRequest("m", "9"))
        with pytest.raises(VersionNotFound):
            select_version(table(versions=("2.0",)), InferenceRequest("m"))


class TestWeighted:
    @pytest.mark.parametrize("start", [0, 1, 4321, 9999])
    @pytest.mark.parametrize("weights", [NINETY_TEN, {"1.0": 3333, "2.0": 6667}, {"1.0": 9999, "2.0": 1}])
    def test_shares_are_exact_over_each_ten_thousand_calls_of_a_process(self, start, weights):
        assert (
            answers(weighted(weights), [(InferenceRequest("m"), lot) for lot in lots(start, BUCKET_COUNT)])
            == weights
        )

    @pytest.mark.parametrize("every", [2, 3, 4, 5, 7, 10])
    def test_and_even_for_those_who_send_only_some_of_them(self, every):
        """Two clients that take turns on one connection each get the same split."""
        found = answers(weighted(), [(InferenceRequest("m"), lot) for lot in lots(17, BUCKET_COUNT, every)])
        assert abs(found["2.0"] - 1000) <= every

    def test_a_few_calls_are_spread_as_well_as_can_be(self):
        for start in range(0, BUCKET_COUNT, 500):
            found = answers(weighted(), [(InferenceRequest("m"), lot) for lot in lots(start, 100)])
            assert 9 <= found["2.0"] <= 11, start

    def test_a_version_without_a_share_gets_nothing(self):
        policy = weighted({"1.0": BUCKET_COUNT, "2.0": 0})
        assert answers(
            policy, [(InferenceRequest("m"), lot) for lot in range(0, BUCKET_COUNT, 7)]
        ).keys() == {"1.0"}

    def test_a_removed_version_is_reported(self):
        with pytest.raises(VersionNotFound, match=r"3\.0"):
            select_version(table(weighted({"3.0": BUCKET_COUNT})), InferenceRequest("m"))


def with_json(who: str) -> InferenceRequest:
    return InferenceRequest("m", inputs=(InputPart("body", b'{"user":{"id":"%s"}}' % who.encode()),))


class TestSticky:
    CALLS = {
        "header": (StickyKey(header="X-User"), lambda who: InferenceRequest("m", headers={"x-user": who})),
        "cookie": (
            StickyKey(cookie="user"),
            lambda who: InferenceRequest("m", headers={"cookie": f"a=b; user={who}; c=d"}),
        ),
        "json": (StickyKey(json="$.user.id"), with_json),
    }

    @pytest.mark.parametrize("source", CALLS)
    def test_a_sticky_key_gets_the_same_version_for_every_bucket_cursor(self, source):
        key, call = self.CALLS[source]
        rows = table(sticky(key))
        given = {
            who: {select_version(rows, call(f"user{who}"), lot).route.version for lot in (0, 9999)}
            for who in range(2000)
        }
        assert all(len(versions) == 1 for versions in given.values())
        share = sum(versions == {"2.0"} for versions in given.values()) / 2000
        assert 0.07 < share < 0.13

    def test_wherever_the_key_stands_it_leads_to_the_same_version(self):
        for who in map(str, range(200)):
            given = {
                select_version(table(sticky(key)), call(who), 0).route.version
                for key, call in self.CALLS.values()
            }
            assert len(given) == 1

    def test_who_shows_no_key_is_dealt_out_call_by_call(self):
        calls = [(InferenceRequest("m", headers={"x-user": ""}), lot) for lot in lots(0, BUCKET_COUNT)]
        assert answers(sticky(StickyKey(header="x-user")), calls) == NINETY_TEN

    def test_a_growing_share_takes_callers_along_and_moves_no_other(self):
        def given(policy: TrafficPolicy) -> list[str]:
            rows = table(policy)
            return [
                select_version(rows, InferenceRequest("m", headers={"u": str(who)})).route.version
                for who in range(3000)
            ]

        key = StickyKey(header="u")
        ten = sticky(key)
        weights = {"1.0": 8000, "2.0": 2000}
        twenty = TrafficPolicy("sticky", weights, key, allocation=allocate(weights, before=ten.allocation))
        moves = Counter(zip(given(ten), given(twenty), strict=True))
        assert moves["2.0", "1.0"] == 0
        assert 0.07 < moves["1.0", "2.0"] / 3000 < 0.13

    def test_models_and_salts_deal_out_the_same_callers_independently(self):
        key = StickyKey(header="u")
        salts = [sticky(key, {"1.0": 5000, "2.0": 5000}, salt) for salt in ("", "other")]
        calls = [InferenceRequest("m", headers={"u": str(who)}) for who in range(4000)]
        pairs = Counter(
            tuple(select_version(table(policy), call).route.version for policy in salts) for call in calls
        )
        assert all(900 < count < 1100 for count in pairs.values()) and len(pairs) == 4


class TestBucket:
    def test_it_is_the_same_everywhere_and_for_ever(self):
        assert [bucket_of_key("m", key) for key in ("", "alice", "bob", "ü", "\udc80")] == [
            5291,
            8316,
            781,
            7318,
            2535,
        ]

    def test_salt_and_key_do_not_run_into_each_other(self):
        assert bucket_of_key("ab", "c") != bucket_of_key("a", "bc")

    def test_buckets_are_uniform(self):
        counts = Counter(bucket_of_key("m", f"user-{i}") // 100 for i in range(100_000))
        chi = sum((counts[cell] - 1000) ** 2 / 1000 for cell in range(100))
        assert len(counts) == 100
        assert 50 < chi < 160  # 99 degrees of freedom: mean 99, deviation 14

    def test_salts_are_unrelated(self):
        random = Random(1)
        keys = [f"{random.random()}" for _ in range(20_000)]
        same = sum(bucket_of_key("a", key) // 1000 == bucket_of_key("b", key) // 1000 for key in keys)
        assert 1800 < same < 2200


class TestUnit:
    @pytest.mark.parametrize(
        ("cookie", "shown"),
        [
            ("u=1", "1"),
            ("a=2; u=1", "1"),
            ("a=2;u=1 ;b=3", "1"),
            ("uu=1", ""),
            ("u", ""),
            ("u=a=b", "a=b"),
            ("", ""),
        ],
    )
    def test_a_cookie(self, cookie, shown):
        assert extract_unit(StickyKey(cookie="u"), InferenceRequest("m", headers={"cookie": cookie})) == shown

    def test_without_cookies(self):
        assert extract_unit(StickyKey(cookie="u"), InferenceRequest("m")) == ""

    @pytest.mark.parametrize(
        ("body", "shown"),
        [
            (b'{"u": "x"}', "x"),
            (b'{"u": 7}', "7"),
            (b'{"u": true}', "true"),
            (b'{"u": [1, {"a": 2}]}', '[1,{"a":2}]'),
            (b'{"u": null}', ""),
            (b'{"v": 7}', ""),
            (b"\x89PNG", ""),
            (b"", ""),
            (b'"text"', ""),
            (b"[1]", ""),
        ],
    )
    def test_a_place_in_json(self, body, shown):
        assert (
            extract_unit(StickyKey(json="$.u"), InferenceRequest("m", inputs=(InputPart("body", body),)))
            == shown
        )

    def test_the_first_part_of_a_form_that_has_it(self):
        parts = (
            InputPart("image", b"\xff\xd8"),
            InputPart("meta", b'{"u": "x"}'),
            InputPart("more", b'{"u": "y"}'),
        )
        assert extract_unit(StickyKey(json="u"), InferenceRequest("m", inputs=parts)) == "x"


class TestBesideThePolicy:
    POLICY = weighted(header="x-model-version", labels={"canary": "2.0", "gone": "3.0"})

    @pytest.mark.parametrize(("result", "version"), [("2.0", "2.0"), ("1.0", "1.0"), ("canary", "2.0")])
    def test_a_tester_names_a_version_or_a_label(self, result, version):
        for lot in (0, 9999):
            choice = select_version(
                table(self.POLICY), InferenceRequest("m", headers={"x-model-version": result}), lot
            )
            assert (choice.route.version, choice.routed_by_policy) == (version, False)

    def test_a_header_that_says_nothing_is_none(self):
        assert select_version(
            table(self.POLICY), InferenceRequest("m", headers={"x-model-version": ""}), 9999
        ).routed_by_policy

    def test_a_header_that_no_policy_speaks_of_is_nothing(self):
        assert (
            select_version(
                table(weighted()), InferenceRequest("m", headers={"x-model-version": "2.0"}), 0
            ).route.version
            == "1.0"
        )

    def test_a_label_stands_for_a_version(self):
        assert select_version(table(self.POLICY), InferenceRequest("m", "canary")).route.version == "2.0"

    @pytest.mark.parametrize("result", ["9", "gone", "Canary"])
    def test_what_a_tester_or_a_path_names_must_be_there(self, result):
        for call in (
            InferenceRequest("m", headers={"x-model-version": result}),
            InferenceRequest("m", result),
        ):
            with pytest.raises(VersionNotFound, match=f"Model version: {result} does not exist for model: m"):
                select_version(table(self.POLICY), call)


class TestTrial:
    def test_it_takes_the_place_of_the_policy(self):
        found = Counter(
            (choice.route.version, choice.arm, choice.active_split is not None, choice.routed_by_policy)
            for choice in (
                select_version(table(weighted(), trial_of()), InferenceRequest("m"), lot)
                for lot in lots(3, BUCKET_COUNT)
            )
        )
        assert found == {("1.0", "a", True, True): 5000, ("2.0", "b", True, True): 5000}

    def test_a_sticky_key_stays_in_an_arm(self):
        trial = trial_of(StickyKey(header="u"))
        for who in map(str, range(100)):
            call = InferenceRequest("m", headers={"u": who})
            one, other = (select_version(table(trial=trial), call, lot) for lot in (0, 9999))
            assert one == other
            assert (one.unit, one.bucket) == (who, bucket_of_key("salt", who))
            assert one.arm == ("a" if one.bucket < 5000 else "b")

    def test_who_shows_no_key_gets_the_baseline_and_is_not_counted(self):
        choice = select_version(table(trial=trial_of(StickyKey(header="u"))), InferenceRequest("m"), 9999)
        assert (choice.route.version, choice.active_split, choice.arm, choice.routed_by_policy) == (
            "1.0",
            None,
            "a",
            True,
        )

    def test_who_names_a_version_is_not_in_it(self):
        policy = TrafficPolicy(header="v", labels={"canary": "2.0"})
        for call in (
            InferenceRequest("m", "2.0"),
            InferenceRequest("m", "canary"),
            InferenceRequest("m", headers={"v": "2.0"}),
        ):
            choice = select_version(table(policy, trial_of()), call, 0)
            assert (choice.route.version, choice.active_split, choice.routed_by_policy) == (
                "2.0",
                None,
                False,
            )

    def test_a_removed_version_is_reported(self):
        with pytest.raises(VersionNotFound, match=r"2\.0"):
            select_version(table(trial=trial_of(), versions=("1.0",)), InferenceRequest("m"), 9999)


class TestWhole:
    """Which version's replicas may take the model's own route."""

    @pytest.mark.parametrize(
        ("policy", "trial", "version"),
        [
            (TrafficPolicy(), None, "1.0"),
            (TrafficPolicy(header="v", labels={"canary": "2.0"}), None, "1.0"),
            (weighted(), None, None),
            (weighted({"2.0": BUCKET_COUNT}), None, "2.0"),
            (weighted({"1.0": 0, "2.0": BUCKET_COUNT}), None, "2.0"),
            (TrafficPolicy(shadow=ShadowPolicy("2.0", 10)), None, None),
            (TrafficPolicy(), trial_of(), None),
        ],
    )
    def test_one_that_answers_everything(self, policy, trial, version):
        assert sole_version(table(policy, trial).models["m"]) == version


def test_a_choice_and_its_row_cross_processes() -> None:
    rows = table(weighted(), trial_of(StickyKey(header="u")))
    assert pickle.loads(pickle.dumps(rows)) == rows
