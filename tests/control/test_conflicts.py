"""Policies in the registry, and what they, experiments and rollouts keep from being changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.control.registry import Registry, TableBuilder, desired_states
from serve_app.control.registry_changes import (
    apply_archive,
    apply_declared_policy,
    register,
    set_default,
    set_policy,
    unregister,
)
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.model import ModelSpec
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.domain.traffic_policy import BUCKET_COUNT, BucketAllocation, TrafficPolicy, read
from serve_app.errors import (
    BadRequest,
    CannotRemoveDefault,
    Conflict,
    ModelNotFound,
    RelayError,
    VersionNotFound,
)

NINETY_TEN = {"1.0": 9000, "2.0": 1000}


def spec(version: str = "1.0", name: str = "m", workers: int = 1) -> ModelSpec:
    return ModelSpec(
        name, version, f"{name}.mar", "d" * 64, "file:///a", min_workers=workers, max_workers=workers
    )


def registry(*versions: str, **policy) -> Registry:
    whole = register(Registry(), spec(name="other"))
    for version in versions or ("1.0", "2.0", "3.0"):
        whole = register(whole, spec(version))
    return set_policy(whole, "m", read(policy)) if policy else whole


def experiment(state: str = "running", model: str = "m") -> Experiment:
    arms = {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)}
    return Experiment("colours", arms, (ExperimentMetric("time"),), "a", id="e1", model=model, state=state)


def rollout(state: str = "running") -> Rollout:
    return Rollout(RolloutPlan("2.0"), "r1", "m", "1.0", state, 0.0)


def with_experiment(whole: Registry, **more) -> Registry:
    return replace(whole, experiments={"e1": experiment(**more)})


def with_rollout(whole: Registry, state: str = "running") -> Registry:
    return replace(whole, rollouts={"m": rollout(state)})


class TestSetPolicy:
    def test_a_policy_is_kept_with_its_buckets(self):
        whole = registry(versions=NINETY_TEN)
        policy = whole.models["m"].policy
        assert policy == TrafficPolicy(
            "weighted", NINETY_TEN, allocation=BucketAllocation((9000, BUCKET_COUNT), ("1.0", "2.0"))
        )
        assert whole.models["other"].policy == TrafficPolicy()
        assert TableBuilder().build(whole, {}, {}, 1, True).models["m"].policy == policy

    def test_the_fewest_callers_move_from_the_default_and_from_a_policy(self):
        weights = {"2.0": 1000, "1.0": 9000}
        first = set_policy(set_default(registry(), "m", "2.0")[0], "m", read({"versions": weights}))
        assert first.models["m"].policy.allocation == BucketAllocation((1000, BUCKET_COUNT), ("2.0", "1.0"))
        second = set_policy(
            first, "m", read({"key": {"header": "u"}, "versions": {"1.0": 8000, "3.0": 2000}})
        )
        assert second.models["m"].policy.allocation == BucketAllocation(
            (1000, 9000, BUCKET_COUNT), ("3.0", "1.0", "3.0")
        )

    def test_back_to_the_default(self):
        whole = set_policy(registry(versions=NINETY_TEN), "m", TrafficPolicy())
        assert whole == registry()

    def test_where_one_version_has_all_its_application_owns_the_models_route(self):
        routes = {
            app: want.route for app, want in desired_states(registry(versions={"2.0": BUCKET_COUNT})).items()
        }
        assert routes["m--2.0"] == "/predictions/m"
        assert routes["m--1.0"] == "/predictions/m/1.0"
        assert "/predictions/m" not in {
            want.route for want in desired_states(registry(versions=NINETY_TEN)).values()
        }

    @pytest.mark.parametrize(
        ("document", "error", "result"),
        [
            (
                {"versions": {"1.0": 5000, "9": 5000}},
                VersionNotFound,
                "Model version: 9 does not exist for model: m",
            ),
            ({"labels": {"canary": "9"}}, VersionNotFound, "Model version: 9 does not"),
            ({"shadow": {"version": "9"}}, VersionNotFound, "Model version: 9 does not"),
            ({"labels": {"2.0": "1.0"}}, BadRequest, "the label '2.0' is a version's name too"),
            ({"labels": {"a/b": "1.0"}}, BadRequest, "'a/b' cannot be part of a route: labels have letters"),
            ({"labels": {"": "1.0"}}, BadRequest, "'' cannot be part of a route"),
            ({"shadow": {"version": "1.0"}}, BadRequest, "shadow.version 1.0 answers every call itself"),
            (
                {"versions": {"2.0": BUCKET_COUNT}, "shadow": {"version": "2.0"}},
                BadRequest,
                "shadow.version 2.0 answers every call itself",
            ),
            ({"versions": {"1.0": 5000, "idle": 5000}}, BadRequest, "version idle has no workers"),
            ({"shadow": {"version": "idle"}}, BadRequest, "version idle has no workers"),
        ],
    )
    def test_what_does_not_fit_the_model_is_refused(self, document, error, result):
        whole = register(registry(), spec("idle", workers=0))
        with pytest.raises(error) as caught:
            set_policy(whole, "m", read(document))
        assert type(caught.value) is error
        assert result in str(caught.value)

    def test_what_does_fit(self):
        whole = register(registry(), spec("idle", workers=0))
        for document in (
            {"versions": {"1.0": BUCKET_COUNT, "idle": 0}},
            {"labels": {"canary": "2.0", "next": "2.0", "_x.y-z": "idle"}},
            {"versions": {"2.0": BUCKET_COUNT}, "shadow": {"version": "1.0"}},
            {"versions": NINETY_TEN, "shadow": {"version": "2.0"}},
        ):
            set_policy(whole, "m", read(document))

    def test_a_model_that_is_not_there(self):
        with pytest.raises(ModelNotFound):
            set_policy(registry(), "n", TrafficPolicy())

    def test_an_experiment_or_a_rollout_stands_against_it(self):
        result = (
            "The traffic policy of model m cannot be changed: the experiment 'colours' is "
            "running; stop it first: "
        )
        with pytest.raises(Conflict, match=result + "DELETE /experiments/e1"):
            set_policy(with_experiment(registry()), "m", TrafficPolicy())
        for state in ("starting", "running", "paused"):
            with pytest.raises(
                Conflict, match=r"a rollout of version 2\.0 is under way; .* POST /models/m/rollout/abort"
            ):
                set_policy(with_rollout(registry(), state), "m", TrafficPolicy())
        for over in (
            with_experiment(registry(), state="stopped"),
            with_experiment(registry(), model="other"),
            with_rollout(registry(), "promoted"),
        ):
            set_policy(over, "m", TrafficPolicy())


class TestDeclare:
    POLICY = read({"versions": NINETY_TEN})

    def test_what_the_settings_say_holds_until_it_is_changed_and_until_they_say_something_new(self):
        first = apply_declared_policy(registry(), "m", self.POLICY)
        assert first.models["m"].policy.versions == NINETY_TEN
        changed = set_policy(first, "m", TrafficPolicy())
        assert apply_declared_policy(changed, "m", self.POLICY) is changed
        again = apply_declared_policy(changed, "m", read({"versions": {"1.0": 5000, "2.0": 5000}}))
        assert again.models["m"].policy.versions["2.0"] == 5000
        assert apply_declared_policy(again, "m", self.POLICY).models["m"].policy.versions == NINETY_TEN

    def test_what_cannot_be_put_in_force_is_tried_again(self):
        with pytest.raises(Conflict):
            apply_declared_policy(with_experiment(registry()), "m", self.POLICY)
        with pytest.raises(VersionNotFound):
            apply_declared_policy(registry("1.0"), "m", self.POLICY)


class TestDefault:
    def test_a_policy_by_shares_is_not_touched(self):
        whole = registry(versions=NINETY_TEN)
        after, _ = set_default(whole, "m", "2.0")
        assert (after.models["m"].default, after.models["m"].policy) == ("2.0", whole.models["m"].policy)

    def test_a_rollout_says_who_the_default_is(self):
        with pytest.raises(
            Conflict, match=r"^The default of model m cannot be changed: a rollout of version 2\.0"
        ):
            set_default(with_rollout(registry()), "m", "3.0")
        assert set_default(with_rollout(registry(), "aborted"), "m", "3.0")[0].models["m"].default == "3.0"

    def test_a_shadow_is_not_what_it_is_compared_with(self):
        with pytest.raises(Conflict, match=r"Version 2\.0 is the shadow of model m.*PUT /models/m/traffic"):
            set_default(registry(shadow={"version": "2.0"}), "m", "2.0")
        whole = registry(versions={"1.0": BUCKET_COUNT}, shadow={"version": "2.0"})
        assert set_default(whole, "m", "2.0")[0].models["m"].default == "2.0"


class TestUnregister:
    @pytest.mark.parametrize(
        ("document", "result"),
        [
            (
                {"versions": NINETY_TEN},
                r"\(weighted\) gives it 1000 basis points; .* PUT /models/m/traffic, or DELETE",
            ),
            ({"versions": {"1.0": BUCKET_COUNT, "2.0": 0}}, "gives it 0 basis points"),
            ({"versions": NINETY_TEN, "key": {"cookie": "u"}}, r"\(sticky\)"),
            ({"labels": {"canary": "2.0"}}, r"\(default\) gives it the label 'canary'"),
            ({"shadow": {"version": "2.0"}}, r"gives it the shadow"),
        ],
    )
    def test_a_version_that_a_policy_names_stays(self, document, result):
        whole = registry(**document)
        begin = r"^Version 2\.0 of model m cannot be removed: the model's traffic policy.*"
        with pytest.raises(Conflict, match=begin + result):
            unregister(whole, "m", "2.0")
        assert "3.0" not in unregister(whole, "m", "3.0")[0].models["m"].versions

    def test_the_policy_is_named_before_the_default(self):
        whole = registry(versions=NINETY_TEN)
        with pytest.raises(Conflict):
            unregister(whole, "m", None)
        with pytest.raises(CannotRemoveDefault):
            unregister(set_policy(whole, "m", TrafficPolicy()), "m", None)

    def test_an_experiments_and_a_rollouts_versions_stay_while_they_last(self):
        whole, _ = set_default(registry(), "m", "3.0")
        with pytest.raises(
            Conflict, match="the experiment 'colours' is running; stop it first: DELETE /experiments/e1"
        ):
            unregister(with_experiment(whole), "m", "2.0")
        for version in ("1.0", "2.0"):
            with pytest.raises(Conflict, match=r"a rollout of version 2\.0 is under way"):
                unregister(with_rollout(whole), "m", version)
        for over in (with_experiment(whole, state="stopped"), with_rollout(whole, "rolled_back")):
            assert "2.0" not in unregister(over, "m", "2.0")[0].models["m"].versions

    def test_with_its_last_version_a_model_takes_its_policy_experiments_and_rollout_along(self):
        whole = registry("1.0", labels={"stable": "1.0"})
        theirs = replace(experiment(model="other"), id="e2")
        ended = replace(
            with_rollout(with_experiment(whole, state="stopped"), "aborted"),
            experiments={"e1": experiment("stopped"), "e2": theirs},
        )
        after, _ = unregister(ended, "m", "1.0")
        assert (set(after.models), after.experiments, after.rollouts) == ({"other"}, {"e2": theirs}, {})

    def test_but_not_while_an_experiment_is_running(self):
        alone = replace(experiment(), arms={"a": Arm("1.0", 5000), "b": Arm("1.0", 5000)})
        with pytest.raises(Conflict):
            unregister(replace(registry("1.0"), experiments={"e1": alone}), "m", None)


@pytest.mark.parametrize("enter", [register, apply_archive])
def test_a_version_is_not_called_like_a_label(enter) -> None:
    whole = registry(labels={"canary": "2.0"})
    with pytest.raises(BadRequest, match=r"Version canary cannot .* calls version 2\.0\. Give one"):
        enter(whole, spec("canary"))
    assert enter(whole, spec("canary", "other")).models["other"].versions.keys() == {"1.0", "canary"}


def test_a_refusal_changes_nothing() -> None:
    whole = registry(versions=NINETY_TEN)
    before = whole.models["m"]
    for document in ({"versions": {"9": BUCKET_COUNT}}, {"shadow": {"version": "1.0"}}):
        with pytest.raises(RelayError):
            set_policy(whole, "m", read(document))
    assert whole.models["m"] is before
