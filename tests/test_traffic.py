"""Which version a call gets: every branch, and that shares are met."""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random

import pytest

from serve_app import traffic
from serve_app.errors import ModelNotFound, VersionNotFound
from serve_app.policy import WHOLE, Key, Policy, Shadow, Trial, allocate
from serve_app.traffic import after, bucket, choose, unit, whole
from serve_app.types import Call, Input, ModelRow, Table, VersionRow

NINETY_TEN = {"1.0": 9000, "2.0": 1000}


DEFAULT = Policy()


def table(policy: Policy = DEFAULT, trial: Trial | None = None, versions: tuple[str, ...] = ("1.0", "2.0")) -> Table:
    rows = {version: VersionRow(version, "ready", 1) for version in versions}
    return Table(1, {"m": ModelRow("1.0", rows, policy, trial)})


def weighted(weights: dict[str, int] = NINETY_TEN, **more) -> Policy:
    return Policy("weighted", weights, allocation=allocate(weights), **more)


def sticky(key: Key, weights: dict[str, int] = NINETY_TEN, salt: str = "") -> Policy:
    return Policy("sticky", weights, key, salt, allocation=allocate(weights))


def trial_of(key: Key | None = None, **more) -> Trial:
    return Trial("t", {"a": "1.0", "b": "2.0"}, allocate({"a": 5000, "b": 5000}), "a", key, "salt", **more)


def lots(start: int, count: int, every: int = 1) -> list[int]:
    """The lots of every so manieth of a process's calls."""
    found = []
    lot = start
    for i in range(count * every):
        lot = after(lot)
        if i % every == 0:
            found.append(lot)
    return found


def answers(policy: Policy, calls: list[tuple[Call, int]]) -> Counter[str]:
    rows = table(policy)
    return Counter(choose(rows, call, lot).row.version for call, lot in calls)


class TestDefault:
    def test_a_call_that_names_no_version_gets_the_default_one(self):
        assert choose(table(), Call("m")) == traffic.Choice(VersionRow("1.0", "ready", 1), by_policy=True)

    def test_a_call_that_names_one_gets_it_whatever_the_policy(self):
        for policy in (Policy(), weighted(), Policy(header="x-v", labels={"x": "1.0"})):
            choice = choose(table(policy), Call("m", "2.0", headers={"x-v": "1.0"}))
            assert (choice.row.version, choice.by_policy) == ("2.0", False)

    def test_an_empty_version_is_none(self):
        assert choose(table(), Call("m", "")).row.version == "1.0"

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound, match="^Model not found: n$"):
            choose(table(), Call("n"))
        with pytest.raises(VersionNotFound, match=r"^Model version: 9 does not exist for model: m$"):
            choose(table(), Call("m", "9"))
        with pytest.raises(VersionNotFound):
            choose(table(versions=("2.0",)), Call("m"))


class TestWeighted:
    @pytest.mark.parametrize("start", [0, 1, 4321, 9999])
    @pytest.mark.parametrize("weights", [NINETY_TEN, {"1.0": 3333, "2.0": 6667}, {"1.0": 9999, "2.0": 1}])
    def test_shares_are_exact_over_each_ten_thousand_calls_of_a_process(self, start, weights):
        assert answers(weighted(weights), [(Call("m"), lot) for lot in lots(start, WHOLE)]) == weights

    @pytest.mark.parametrize("every", [2, 3, 4, 5, 7, 10])
    def test_and_even_for_those_who_send_only_some_of_them(self, every):
        """Two clients that take turns on one connection each get the same split."""
        found = answers(weighted(), [(Call("m"), lot) for lot in lots(17, WHOLE, every)])
        assert abs(found["2.0"] - 1000) <= every

    def test_a_few_calls_are_spread_as_well_as_can_be(self):
        for start in range(0, WHOLE, 500):
            found = answers(weighted(), [(Call("m"), lot) for lot in lots(start, 100)])
            assert 9 <= found["2.0"] <= 11, start

    def test_a_version_without_a_share_gets_nothing(self):
        policy = weighted({"1.0": WHOLE, "2.0": 0})
        assert answers(policy, [(Call("m"), lot) for lot in range(0, WHOLE, 7)]).keys() == {"1.0"}

    def test_a_version_that_is_gone_is_said(self):
        with pytest.raises(VersionNotFound, match="3.0"):
            choose(table(weighted({"3.0": WHOLE})), Call("m"))


def with_json(who: str) -> Call:
    return Call("m", inputs=(Input("body", b'{"user":{"id":"%s"}}' % who.encode()),))


class TestSticky:
    CALLS = {
        "header": (Key(header="X-User"), lambda who: Call("m", headers={"x-user": who})),
        "cookie": (Key(cookie="user"), lambda who: Call("m", headers={"cookie": f"a=b; user={who}; c=d"})),
        "json": (Key(json="$.user.id"), with_json),
    }

    @pytest.mark.parametrize("source", CALLS)
    def test_whoever_shows_the_same_key_gets_the_same_version_whatever_the_lot(self, source):
        key, call = self.CALLS[source]
        rows = table(sticky(key))
        given = {who: {choose(rows, call(f"user{who}"), lot).row.version for lot in (0, 9999)} for who in range(2000)}
        assert all(len(versions) == 1 for versions in given.values())
        share = sum(versions == {"2.0"} for versions in given.values()) / 2000
        assert 0.07 < share < 0.13

    def test_wherever_the_key_stands_it_leads_to_the_same_version(self):
        for who in map(str, range(200)):
            given = {choose(table(sticky(key)), call(who), 0).row.version for key, call in self.CALLS.values()}
            assert len(given) == 1

    def test_who_shows_no_key_is_dealt_out_call_by_call(self):
        calls = [(Call("m", headers={"x-user": ""}), lot) for lot in lots(0, WHOLE)]
        assert answers(sticky(Key(header="x-user")), calls) == NINETY_TEN

    def test_a_growing_share_takes_callers_along_and_moves_no_other(self):
        def given(policy: Policy) -> list[str]:
            rows = table(policy)
            return [choose(rows, Call("m", headers={"u": str(who)})).row.version for who in range(3000)]

        key = Key(header="u")
        ten = sticky(key)
        weights = {"1.0": 8000, "2.0": 2000}
        twenty = Policy("sticky", weights, key, allocation=allocate(weights, before=ten.allocation))
        moves = Counter(zip(given(ten), given(twenty), strict=True))
        assert moves["2.0", "1.0"] == 0
        assert 0.07 < moves["1.0", "2.0"] / 3000 < 0.13

    def test_models_and_salts_deal_out_the_same_callers_independently(self):
        key = Key(header="u")
        salts = [sticky(key, {"1.0": 5000, "2.0": 5000}, salt) for salt in ("", "other")]
        calls = [Call("m", headers={"u": str(who)}) for who in range(4000)]
        pairs = Counter(tuple(choose(table(policy), call).row.version for policy in salts) for call in calls)
        assert all(900 < count < 1100 for count in pairs.values()) and len(pairs) == 4


class TestBucket:
    def test_it_is_the_same_everywhere_and_for_ever(self):
        assert [bucket("m", key) for key in ("", "alice", "bob", "ü", "\udc80")] == [5291, 8316, 781, 7318, 2535]

    def test_salt_and_key_do_not_run_into_each_other(self):
        assert bucket("ab", "c") != bucket("a", "bc")

    def test_buckets_are_uniform(self):
        counts = Counter(bucket("m", f"user-{i}") // 100 for i in range(100_000))
        chi = sum((counts[cell] - 1000) ** 2 / 1000 for cell in range(100))
        assert len(counts) == 100
        assert 50 < chi < 160  # 99 degrees of freedom: mean 99, deviation 14

    def test_salts_are_unrelated(self):
        random = Random(1)
        keys = [f"{random.random()}" for _ in range(20_000)]
        same = sum(bucket("a", key) // 1000 == bucket("b", key) // 1000 for key in keys)
        assert 1800 < same < 2200


class TestUnit:
    @pytest.mark.parametrize(
        ("cookie", "shown"),
        [("u=1", "1"), ("a=2; u=1", "1"), ("a=2;u=1 ;b=3", "1"), ("uu=1", ""), ("u", ""), ("u=a=b", "a=b"), ("", "")],
    )
    def test_a_cookie(self, cookie, shown):
        assert unit(Key(cookie="u"), Call("m", headers={"cookie": cookie})) == shown

    def test_without_cookies(self):
        assert unit(Key(cookie="u"), Call("m")) == ""

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
        assert unit(Key(json="$.u"), Call("m", inputs=(Input("body", body),))) == shown

    def test_the_first_part_of_a_form_that_has_it(self):
        parts = (Input("image", b"\xff\xd8"), Input("meta", b'{"u": "x"}'), Input("more", b'{"u": "y"}'))
        assert unit(Key(json="u"), Call("m", inputs=parts)) == "x"


class TestBesideThePolicy:
    POLICY = weighted(header="x-model-version", labels={"canary": "2.0", "gone": "3.0"})

    @pytest.mark.parametrize(("said", "version"), [("2.0", "2.0"), ("1.0", "1.0"), ("canary", "2.0")])
    def test_a_tester_names_a_version_or_a_label(self, said, version):
        for lot in (0, 9999):
            choice = choose(table(self.POLICY), Call("m", headers={"x-model-version": said}), lot)
            assert (choice.row.version, choice.by_policy) == (version, False)

    def test_a_header_that_says_nothing_is_none(self):
        assert choose(table(self.POLICY), Call("m", headers={"x-model-version": ""}), 9999).by_policy

    def test_a_header_that_no_policy_speaks_of_is_nothing(self):
        assert choose(table(weighted()), Call("m", headers={"x-model-version": "2.0"}), 0).row.version == "1.0"

    def test_a_label_stands_for_a_version(self):
        assert choose(table(self.POLICY), Call("m", "canary")).row.version == "2.0"

    @pytest.mark.parametrize("said", ["9", "gone", "Canary"])
    def test_what_a_tester_or_a_path_names_must_be_there(self, said):
        for call in (Call("m", headers={"x-model-version": said}), Call("m", said)):
            with pytest.raises(VersionNotFound, match=f"Model version: {said} does not exist for model: m"):
                choose(table(self.POLICY), call)


class TestTrial:
    def test_it_takes_the_place_of_the_policy(self):
        found = Counter(
            (choice.row.version, choice.arm, choice.trial is not None, choice.by_policy)
            for choice in (choose(table(weighted(), trial_of()), Call("m"), lot) for lot in lots(3, WHOLE))
        )
        assert found == {("1.0", "a", True, True): 5000, ("2.0", "b", True, True): 5000}

    def test_whoever_shows_the_key_stays_in_an_arm(self):
        trial = trial_of(Key(header="u"))
        for who in map(str, range(100)):
            call = Call("m", headers={"u": who})
            one, other = (choose(table(trial=trial), call, lot) for lot in (0, 9999))
            assert one == other
            assert (one.unit, one.bucket) == (who, bucket("salt", who))
            assert one.arm == ("a" if one.bucket < 5000 else "b")

    def test_who_shows_no_key_gets_the_baseline_and_is_not_counted(self):
        choice = choose(table(trial=trial_of(Key(header="u"))), Call("m"), 9999)
        assert (choice.row.version, choice.trial, choice.arm, choice.by_policy) == ("1.0", None, "a", True)

    def test_who_names_a_version_is_not_in_it(self):
        policy = Policy(header="v", labels={"canary": "2.0"})
        for call in (Call("m", "2.0"), Call("m", "canary"), Call("m", headers={"v": "2.0"})):
            choice = choose(table(policy, trial_of()), call, 0)
            assert (choice.row.version, choice.trial, choice.by_policy) == ("2.0", None, False)

    def test_a_version_that_is_gone_is_said(self):
        with pytest.raises(VersionNotFound, match=r"2\.0"):
            choose(table(trial=trial_of(), versions=("1.0",)), Call("m"), 9999)


class TestWhole:
    """Which version's replicas may take the model's own route."""

    @pytest.mark.parametrize(
        ("policy", "trial", "version"),
        [
            (Policy(), None, "1.0"),
            (Policy(header="v", labels={"canary": "2.0"}), None, "1.0"),
            (weighted(), None, None),
            (weighted({"2.0": WHOLE}), None, "2.0"),
            (weighted({"1.0": 0, "2.0": WHOLE}), None, "2.0"),
            (Policy(shadow=Shadow("2.0", 10)), None, None),
            (Policy(), trial_of(), None),
        ],
    )
    def test_one_that_answers_everything(self, policy, trial, version):
        assert whole(table(policy, trial).models["m"]) == version


def test_a_choice_and_its_row_cross_processes() -> None:
    rows = table(weighted(), trial_of(Key(header="u")))
    assert pickle.loads(pickle.dumps(rows)) == rows
