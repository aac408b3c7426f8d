from __future__ import annotations

import itertools
import pickle
from functools import reduce

import pytest

from serve_app.control.registry import (
    ModelRecord,
    Registry,
    TableBuilder,
    desired_states,
    find_version,
)
from serve_app.control.registry_changes import apply_archive, register, scale, set_default, unregister
from serve_app.dataplane.routing import version_router
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, ReplicaInfo
from serve_app.domain.request import InferenceRequest
from serve_app.domain.traffic_policy import TrafficPolicy, allocate
from serve_app.errors import (
    BadRequest,
    CannotRemoveDefault,
    DefaultVersionNotFound,
    ModelNotFound,
    VersionExists,
    VersionNotFound,
)


def spec(name: str = "m", version: str = "1.0", **more) -> ModelSpec:
    return ModelSpec(
        name, version, url=f"{name}.mar", digest="d" * 64, archive=f"file:///cache/{name}", **more
    )


def registry(*specs: ModelSpec) -> Registry:
    return reduce(register, specs, Registry())


class TestRegister:
    def test_the_first_version_becomes_the_default_and_later_ones_do_not(self):
        whole = registry(spec(version="2.0"), spec(version="1.0"))
        assert whole.models["m"].default == "2.0"
        assert list(whole.models["m"].versions) == ["2.0", "1.0"]
        assert [one.ref.app for one in whole] == ["m--2.0", "m--1.0"]

    def test_a_version_stands_once(self):
        with pytest.raises(VersionExists, match=r"^Model version 1\.0 is already registered for model m$"):
            register(registry(spec()), spec(batch_size=2))

    def test_a_refused_change_and_an_accepted_one_leave_the_registry_as_it_was(self):
        whole = registry(spec())
        before = pickle.dumps(whole)
        register(whole, spec(version="2.0"))
        register(whole, spec("n"))
        scale(whole, "m", None, 3, 4)
        unregister(whole, "m", None)
        with pytest.raises(VersionExists):
            register(whole, spec())
        assert pickle.dumps(whole) == before

    def test_names_and_versions_with_double_hyphens_have_applications_of_their_own(self):
        both = registry(spec("a--b", "c", min_workers=1), spec("a", "b--c", min_workers=1))
        assert set(desired_states(both)) == {"a--b--c", "a--.b.1.1c"}

    def test_no_two_versions_share_an_application(self):
        words = [
            "".join(letters)
            for size in range(1, 7)
            for letters in itertools.product("a-.", repeat=size)
            if letters[0] == "a"
        ]
        pairs = [(name, version) for name in words for version in words if len(name + version) < 9]
        apps = {ModelRef(*pair).app for pair in pairs}
        assert len(apps) == len(pairs)

    def test_ordinary_versions_keep_their_applications_name(self):
        assert ModelRef("m", "1.0").app == "m--1.0"
        assert ModelRef("a--b", "1.0-rc.1").app == "a--b--1.0-rc.1"

    def test_a_registry_says_the_same_in_whatever_order_it_was_made(self):
        assert registry(spec("a"), spec("b")) == registry(spec("b"), spec("a"))


class TestPut:
    """What start-up makes of the archives in the model store."""

    def test_a_new_archive_is_registered(self):
        assert apply_archive(Registry(), spec()) == registry(spec())
        whole = apply_archive(registry(spec()), spec(version="2.0"))
        assert whole == registry(spec(), spec(version="2.0"))
        assert whole.models["m"].default == "1.0"

    def test_a_known_archive_changes_nothing_however_its_version_was_changed_since(self):
        scaled, _ = scale(registry(spec(batch_size=4)), "m", None, 3, 3)
        assert apply_archive(scaled, spec(min_workers=1)) is scaled

    def test_a_known_archive_that_was_signed_since_keeps_its_other_changes(self):
        scaled, _ = scale(registry(spec(batch_size=4)), "m", None, 3, 3)
        signed = apply_archive(scaled, spec(min_workers=1).with_(signed_by="a" * 64))
        assert signed.models["m"].versions["1.0"] == find_version(scaled, "m", None).with_(signed_by="a" * 64)

    def test_what_was_removed_stays_away_until_its_archive_changes(self):
        removed, _ = unregister(registry(spec()), "m", None)
        assert apply_archive(removed, spec()) is removed
        changed = spec().with_(digest="e" * 64)
        assert apply_archive(removed, changed).models == registry(changed).models
        assert register(removed, spec()) == registry(spec())

    def test_a_changed_archive_takes_its_versions_place(self):
        whole, _ = set_default(registry(spec(), spec(version="2.0")), "m", "2.0")
        changed = spec().with_(digest="e" * 64)
        assert apply_archive(whole, changed).models == {
            "m": ModelRecord("2.0", {"1.0": changed, "2.0": spec(version="2.0")})
        }
        assert apply_archive(apply_archive(whole, changed), changed).archives == {
            changed.ref: "e" * 64,
            ModelRef("m", "2.0"): "d" * 64,
        }

    def test_a_new_version_becomes_the_default_when_configured(self):
        whole = apply_archive(registry(spec()), spec(version="2.0"), default=True)
        assert whole.models["m"].default == "2.0"
        moved = set_default(whole, "m", "1.0")[0]
        assert apply_archive(moved, spec(version="2.0"), default=True) is moved


class TestUnregister:
    def test_the_last_version_takes_the_model_along(self):
        whole, ref = unregister(registry(spec(), spec("n")), "m", None)
        assert ref == ModelRef("m", "1.0")
        assert whole.models == registry(spec("n")).models

    def test_a_version_that_is_not_the_default_goes_alone(self):
        whole, ref = unregister(registry(spec(), spec(version="2.0")), "m", "2.0")
        assert ref == ModelRef("m", "2.0")
        assert whole.models == registry(spec()).models

    @pytest.mark.parametrize("version", [None, "1.0"])
    def test_the_default_stays_while_others_stand(self, version):
        with pytest.raises(CannotRemoveDefault, match=r"^Cannot remove default version for model m$"):
            unregister(registry(spec(), spec(version="2.0")), "m", version)

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound, match=r"^Model not found: x$"):
            unregister(registry(spec()), "x", None)
        with pytest.raises(VersionNotFound, match=r"^Model version: 9 does not exist for model: m$"):
            unregister(registry(spec()), "m", "9")


class TestScale:
    @pytest.mark.parametrize(("version", "scaled"), [(None, "1.0"), ("2.0", "2.0")])
    def test_one_version_alone_is_scaled(self, version, scaled):
        whole, ref = scale(registry(spec(), spec(version="2.0")), "m", version, 2, 5)
        assert ref == ModelRef("m", scaled)
        workers = {one.version: (one.min_workers, one.max_workers) for one in whole}
        assert workers == {"1.0": (0, 0), "2.0": (0, 0), scaled: (2, 5)}
        assert whole.models["m"].default == "1.0"

    def test_to_nothing(self):
        whole, _ = scale(registry(spec(min_workers=2, max_workers=2)), "m", None, 0, 0)
        assert whole == registry(spec())

    @pytest.mark.parametrize(("low", "high"), [(-1, 1), (2, 1)])
    def test_numbers_that_cannot_be(self, low, high):
        with pytest.raises(BadRequest, match=f"{low} to {high}"):
            scale(registry(spec()), "m", None, low, high)

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound):
            scale(Registry(), "m", None, 1, 1)
        with pytest.raises(VersionNotFound):
            scale(registry(spec()), "m", "9", 1, 1)


class TestDefault:
    def test_moves(self):
        whole, ref = set_default(registry(spec(), spec(version="2.0")), "m", "2.0")
        assert ref == ModelRef("m", "2.0")
        assert whole.models["m"].default == "2.0"
        assert find_version(whole, "m", None).version == "2.0"

    def test_has_words_of_its_own_for_a_version_that_is_not_there(self):
        with pytest.raises(
            DefaultVersionNotFound, match=r"^Model version 9 does not exist for model m$"
        ) as caught:
            set_default(registry(spec()), "m", "9")
        assert isinstance(caught.value, VersionNotFound)
        with pytest.raises(ModelNotFound):
            set_default(Registry(), "m", "1.0")


class TestFind:
    def test_by_version_or_the_default(self):
        whole = registry(spec(), spec(version="2.0"))
        assert find_version(whole, "m", None) == spec()
        assert find_version(whole, "m", "2.0") == spec(version="2.0")

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound):
            find_version(Registry(), "m", None)
        with pytest.raises(VersionNotFound):
            find_version(registry(spec()), "m", "2.0")


class TestDesired:
    def test_only_versions_with_workers_run_and_the_default_owns_the_models_route(self):
        whole = registry(spec(min_workers=1, max_workers=3), spec(version="2.0", min_workers=2), spec("idle"))
        wanted = desired_states(whole)
        assert set(wanted) == {"m--1.0", "m--2.0"}
        one = wanted["m--1.0"]
        assert (one.route, one.min_replicas, one.max_replicas, one.spec) == (
            "/predictions/m",
            1,
            3,
            find_version(whole, "m", "1.0"),
        )
        assert wanted["m--2.0"].route == "/predictions/m/2.0"

    def test_the_route_moves_with_the_default(self):
        whole = registry(spec(min_workers=1), spec(version="2.0", min_workers=1))
        whole, _ = set_default(whole, "m", "2.0")
        assert {app: one.route for app, one in desired_states(whole).items()} == {
            "m--1.0": "/predictions/m/1.0",
            "m--2.0": "/predictions/m",
        }

    def test_a_default_without_workers_leaves_the_models_route_to_the_gateway(self):
        wanted = desired_states(registry(spec(), spec(version="2.0", min_workers=1)))
        assert [one.route for one in wanted.values()] == ["/predictions/m/2.0"]

    def test_a_model_may_own_the_open_protocols_route(self):
        whole = registry(
            spec(min_workers=1, fast_path="oip"), spec(version="2.0", min_workers=1, fast_path="oip")
        )
        assert [one.route for one in desired_states(whole).values()] == [
            "/v2/models/m",
            "/v2/models/m/versions/2.0",
        ]

    @pytest.mark.parametrize(("workers", "routing"), [(2, "prefix"), (1, "prefix"), (2, "load")])
    def test_the_gateways_own_the_routes_of_replicas_that_they_choose_by_prefix(self, workers, routing):
        whole = registry(spec(min_workers=workers, routing=routing))
        by_prefix = (workers, routing) == (2, "prefix")
        assert [one.route for one in desired_states(whole).values()] == [
            None if by_prefix else "/predictions/m"
        ]
        row = TableBuilder().build(whole, {}, {}, 1, True).models["m"].versions["1.0"]
        assert row.routing == ("prefix" if by_prefix else "load")

    def test_a_policy_that_divides_the_traffic_sends_every_version_to_its_own_route(self):
        record = registry(spec(min_workers=1)).models["m"]
        weights = {"1.0": 9000, "2.0": 1000}
        policy = TrafficPolicy("weighted", weights, allocation=allocate(weights))
        whole = Registry({"m": ModelRecord(record.default, record.versions, policy)})
        assert [one.route for one in desired_states(whole).values()] == ["/predictions/m/1.0"]

    def test_no_two_applications_have_one_route(self):
        names = ["m", "n", "predictions", "m--1.0"]
        whole = registry(
            *(spec(name, version, min_workers=1) for name in names for version in ("1.0", "2.0"))
        )
        routes = [one.route for one in desired_states(whole).values()]
        assert len(routes) == 8 == len(set(routes))


class TestTable:
    def test_carries_what_the_data_plane_needs(self):
        one = spec(min_workers=1, batch_size=8, job_queue_size=7, client_timeout=50, retries=False)
        ready = ModelStatus("ready", replicas=2, last_error="it was killed, once")
        made = TableBuilder().build(
            registry(one), {one.ref: ready}, {one.ref: False}, generation=4, startup_complete=True
        )
        assert (made.generation, made.startup_complete) == (4, True)
        row = version_router.select_version(made, InferenceRequest("m")).route
        assert (row.version, row.phase, row.replicas, row.last_error, row.healthy) == (
            "1.0",
            "ready",
            2,
            "",
            False,
        )
        assert (row.max_batch_size, row.job_queue_size, row.client_timeout, row.retries) == (8, 7, 50, False)
        failed = ModelStatus("failed", last_error="no such file")
        row = version_router.select_version(
            TableBuilder().build(registry(one), {one.ref: failed}, {}, 5, True), InferenceRequest("m")
        ).route
        assert row.last_error == "no such file"

    @pytest.mark.parametrize("loaded", [True, False])
    def test_tells_what_start_up_loaded(self, loaded):
        made = TableBuilder().build(registry(spec(loaded_at_startup=loaded)), {}, {}, 1, True)
        assert version_router.select_version(made, InferenceRequest("m")).route.loaded_at_startup is loaded

    def test_follows_default_and_policy(self):
        whole, _ = set_default(registry(spec(), spec(version="2.0")), "m", "2.0")
        made = TableBuilder().build(whole, {}, {}, 1, False)
        assert version_router.select_version(made, InferenceRequest("m")).route.version == "2.0"
        assert version_router.select_version(made, InferenceRequest("m", "1.0")).route.version == "1.0"
        assert made.models["m"].policy == TrafficPolicy()

    @pytest.mark.parametrize(
        ("workers", "status", "phase"),
        [
            (0, None, "stopped"),
            (1, None, "loading"),
            (1, ModelStatus("stopped"), "loading"),
            (0, ModelStatus("stopped"), "stopped"),
            (1, ModelStatus("failed"), "failed"),
            (0, ModelStatus("ready", 2, workers=(ReplicaInfo("r1", 1, 0.0, True),)), "stopped"),
            (0, ModelStatus("failed"), "failed"),
        ],
    )
    def test_a_requested_version_without_replicas_is_loading(self, workers, status, phase):
        one = spec(min_workers=workers)
        made = TableBuilder().build(registry(one), {one.ref: status} if status else {}, {}, 1, False)
        row = version_router.select_version(made, InferenceRequest("m")).route
        assert (row.phase, row.replicas, row.healthy, row.replica_ids) == (phase, 0, True, ())

    def test_rows_of_unchanged_models_stay_the_same_objects(self):
        both, builder = registry(spec(), spec("n")), TableBuilder()
        statuses = {one.ref: ModelStatus("ready", 1) for one in both}
        first = builder.build(both, statuses, {}, 1, True)
        failed = {**statuses, ModelRef("n", "1.0"): ModelStatus("failed")}
        second = builder.build(both, failed, {}, 2, True)
        assert second.models["m"] is first.models["m"]
        assert second.models["n"].versions["1.0"].phase == "failed"
        third = builder.build(register(both, spec(version="2.0")), failed, {}, 3, True)
        assert set(third.models["m"].versions) == {"1.0", "2.0"}
        assert third.models["n"] is second.models["n"]
        fourth = builder.build(both, failed, {ModelRef("n", "1.0"): False}, 4, True)
        assert fourth.models == {**first.models, "n": fourth.models["n"]}
        assert not fourth.models["n"].versions["1.0"].healthy

    def test_crosses_processes(self):
        made = TableBuilder().build(registry(spec(), spec("n")), {}, {}, 1, False)
        assert pickle.loads(pickle.dumps(made)) == made
