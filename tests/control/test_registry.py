from __future__ import annotations

import pickle

import pytest

from serve_app import traffic
from serve_app.control.registry import (
    Record,
    Registry,
    desired,
    find,
    put,
    register,
    scale,
    set_default,
    table,
    unregister,
)
from serve_app.control.specs import spec_from
from serve_app.errors import (
    BadRequest,
    CannotRemoveDefault,
    ConfigurationError,
    ModelNotFound,
    UnknownDefault,
    VersionExists,
    VersionNotFound,
)
from serve_app.policy import Policy, allocate
from serve_app.settings import load
from serve_app.store.manifest import Manifest, ModelConfig
from serve_app.types import Call, ModelRef, ModelSpec, ModelStatus, Registration


def spec(name: str = "m", version: str = "1.0", **more) -> ModelSpec:
    return ModelSpec(name, version, url=f"{name}.mar", digest="d" * 64, archive=f"file:///cache/{name}", **more)


def registry(*specs: ModelSpec) -> Registry:
    whole = Registry()
    for one in specs:
        whole = register(whole, one)
    return whole


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

    @pytest.mark.parametrize("order", [1, -1])
    def test_two_versions_whose_applications_would_have_one_name_are_refused(self, order):
        one, other = [spec("a--b", "c"), spec("a", "b--c")][::order]
        with pytest.raises(BadRequest, match=r"application a--b--c") as caught:
            register(registry(one), other)
        assert one.name in str(caught.value) and other.name in str(caught.value)

    def test_a_registry_says_the_same_in_whatever_order_it_was_made(self):
        assert registry(spec("a"), spec("b")) == registry(spec("b"), spec("a"))


class TestPut:
    """What start-up makes of the archives in the model store."""

    def test_a_new_archive_is_registered(self):
        assert put(Registry(), spec()) == registry(spec())
        whole = put(registry(spec()), spec(version="2.0"))
        assert whole == registry(spec(), spec(version="2.0"))
        assert whole.models["m"].default == "1.0"

    def test_a_known_archive_changes_nothing_however_its_version_was_changed_since(self):
        scaled, _ = scale(registry(spec(batch_size=4)), "m", None, 3, 3)
        assert put(scaled, spec(min_workers=1)) is scaled

    def test_what_was_removed_stays_away_until_its_archive_changes(self):
        removed, _ = unregister(registry(spec()), "m", None)
        assert put(removed, spec()) is removed
        changed = spec().with_(digest="e" * 64)
        assert put(removed, changed).models == registry(changed).models
        assert register(removed, spec()) == registry(spec())

    def test_a_changed_archive_takes_its_versions_place(self):
        whole, _ = set_default(registry(spec(), spec(version="2.0")), "m", "2.0")
        changed = spec().with_(digest="e" * 64)
        assert put(whole, changed).models == {"m": Record("2.0", {"1.0": changed, "2.0": spec(version="2.0")})}
        assert put(put(whole, changed), changed).archives == {changed.ref: "e" * 64, ModelRef("m", "2.0"): "d" * 64}

    def test_a_new_version_takes_the_default_where_it_is_told_to(self):
        whole = put(registry(spec()), spec(version="2.0"), default=True)
        assert whole.models["m"].default == "2.0"
        moved = set_default(whole, "m", "1.0")[0]
        assert put(moved, spec(version="2.0"), default=True) is moved

    def test_applications_of_one_name_are_refused_here_too(self):
        with pytest.raises(BadRequest):
            put(registry(spec("a--b", "c")), spec("a", "b--c"))


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
        with pytest.raises(CannotRemoveDefault, match="^Cannot remove default version for model m$"):
            unregister(registry(spec(), spec(version="2.0")), "m", version)

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound, match="^Model not found: x$"):
            unregister(registry(spec()), "x", None)
        with pytest.raises(VersionNotFound, match="^Model version: 9 does not exist for model: m$"):
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
        assert find(whole, "m", None).version == "2.0"

    def test_has_words_of_its_own_for_a_version_that_is_not_there(self):
        with pytest.raises(UnknownDefault, match="^Model version 9 does not exist for model m$") as caught:
            set_default(registry(spec()), "m", "9")
        assert isinstance(caught.value, VersionNotFound)
        with pytest.raises(ModelNotFound):
            set_default(Registry(), "m", "1.0")


class TestFind:
    def test_by_version_or_the_default(self):
        whole = registry(spec(), spec(version="2.0"))
        assert find(whole, "m", None) == spec()
        assert find(whole, "m", "2.0") == spec(version="2.0")

    def test_what_is_not_there(self):
        with pytest.raises(ModelNotFound):
            find(Registry(), "m", None)
        with pytest.raises(VersionNotFound):
            find(registry(spec()), "m", "2.0")


class TestDesired:
    def test_only_versions_with_workers_run_and_the_default_owns_the_models_route(self):
        whole = registry(spec(min_workers=1, max_workers=3), spec(version="2.0", min_workers=2), spec("idle"))
        wanted = desired(whole)
        assert set(wanted) == {"m--1.0", "m--2.0"}
        one = wanted["m--1.0"]
        assert (one.route, one.low, one.high, one.spec) == ("/predictions/m", 1, 3, find(whole, "m", "1.0"))
        assert wanted["m--2.0"].route == "/predictions/m/2.0"

    def test_the_route_moves_with_the_default(self):
        whole = registry(spec(min_workers=1), spec(version="2.0", min_workers=1))
        whole, _ = set_default(whole, "m", "2.0")
        assert {app: one.route for app, one in desired(whole).items()} == {
            "m--1.0": "/predictions/m/1.0",
            "m--2.0": "/predictions/m",
        }

    def test_a_default_without_workers_leaves_the_models_route_to_the_gateway(self):
        wanted = desired(registry(spec(), spec(version="2.0", min_workers=1)))
        assert [one.route for one in wanted.values()] == ["/predictions/m/2.0"]

    def test_a_model_may_own_the_open_protocols_route(self):
        whole = registry(spec(min_workers=1, fast_path="oip"), spec(version="2.0", min_workers=1, fast_path="oip"))
        assert [one.route for one in desired(whole).values()] == ["/v2/models/m", "/v2/models/m/versions/2.0"]

    def test_a_policy_that_divides_the_traffic_sends_every_version_to_its_own_route(self):
        record = registry(spec(min_workers=1)).models["m"]
        weights = {"1.0": 9000, "2.0": 1000}
        policy = Policy("weighted", weights, allocation=allocate(weights))
        whole = Registry({"m": Record(record.default, record.versions, policy)})
        assert [one.route for one in desired(whole).values()] == ["/predictions/m/1.0"]

    def test_no_two_applications_have_one_route(self):
        names = ["m", "n", "predictions", "m--1.0"]
        whole = registry(*(spec(name, version, min_workers=1) for name in names for version in ("1.0", "2.0")))
        routes = [one.route for one in desired(whole).values()]
        assert len(routes) == 8 == len(set(routes))


class TestTable:
    def test_carries_what_the_data_plane_needs(self):
        one = spec(min_workers=1, batch_size=8, job_queue_size=7, client_timeout=50, retries=False)
        ready = ModelStatus("ready", replicas=2, last_error="it was killed, once")
        made = table(registry(one), {one.ref: ready}, {one.ref: False}, generation=4, settled=True)
        assert (made.generation, made.settled) == (4, True)
        row = traffic.choose(made, Call("m")).row
        assert (row.version, row.phase, row.replicas, row.last_error, row.healthy) == ("1.0", "ready", 2, "", False)
        assert (row.max_batch_size, row.job_queue_size, row.client_timeout, row.retries) == (8, 7, 50, False)
        failed = ModelStatus("failed", last_error="no such file")
        row = traffic.choose(table(registry(one), {one.ref: failed}, {}, 5, True), Call("m")).row
        assert row.last_error == "no such file"

    @pytest.mark.parametrize("loaded", [True, False])
    def test_tells_what_start_up_loaded(self, loaded):
        made = table(registry(spec(loaded_at_startup=loaded)), {}, {}, 1, True)
        assert traffic.choose(made, Call("m")).row.loaded_at_startup is loaded

    def test_follows_default_and_policy(self):
        whole, _ = set_default(registry(spec(), spec(version="2.0")), "m", "2.0")
        made = table(whole, {}, {}, 1, False)
        assert traffic.choose(made, Call("m")).row.version == "2.0"
        assert traffic.choose(made, Call("m", "1.0")).row.version == "1.0"
        assert made.models["m"].policy == Policy()

    @pytest.mark.parametrize(
        ("workers", "status", "phase"),
        [
            (0, None, "stopped"),
            (1, None, "loading"),
            (1, ModelStatus("stopped"), "loading"),
            (0, ModelStatus("stopped"), "stopped"),
            (1, ModelStatus("failed"), "failed"),
        ],
    )
    def test_a_version_that_was_asked_for_and_has_not_begun_is_loading(self, workers, status, phase):
        one = spec(min_workers=workers)
        made = table(registry(one), {one.ref: status} if status else {}, {}, 1, False)
        row = traffic.choose(made, Call("m")).row
        assert (row.phase, row.replicas, row.healthy) == (phase, 0, True)

    def test_crosses_processes(self):
        made = table(registry(spec(), spec("n")), {}, {}, 1, False)
        assert pickle.loads(pickle.dumps(made)) == made


def made(
    config: str = "", settings: dict | None = None, at_startup: bool = False, manifest: dict | None = None, **asked
) -> ModelSpec:
    """The spec that a registration makes of an archive with this model-config.yaml, under these settings."""
    return spec_from(
        Registration("m.mar", **asked),
        Manifest("m.mar", **{"model_name": "m", "handler": "handler.py", **(manifest or {})}),
        ModelConfig.parse(config),
        digest="d" * 64,
        archive="file:///cache/m",
        settings=load(settings),
        at_startup=at_startup,
    )


class TestSpecFrom:
    def test_nobody_says_anything(self):
        one = made()
        assert one == ModelSpec("m", "1.0", "m.mar", "d" * 64, "file:///cache/m", handler="handler.py")
        assert (one.batch_size, one.max_batch_delay, one.response_timeout, one.startup_timeout) == (1, None, 120, 120)

    def test_the_callers_names_win_over_the_manifests(self):
        theirs = made(manifest={"version": "2", "handler": "h", "runtime": "python3"})
        assert (theirs.ref, theirs.handler, theirs.runtime) == (ModelRef("m", "2"), "h", "python3")
        callers = made(model_name="n", handler="mine.py:go", runtime="LSP")
        assert (callers.ref, callers.handler, callers.runtime) == (ModelRef("n", "1.0"), "mine.py:go", "LSP")

    @pytest.mark.parametrize(
        ("config", "asked", "expected"),
        [
            ("", {"batch_size": 4, "max_batch_delay": 50}, (4, 50)),
            ("batchSize: 8\nmaxBatchDelay: 10", {}, (8, 10)),
            ("batchSize: 8\nmaxBatchDelay: 10", {"batch_size": 4, "max_batch_delay": 50}, (4, 50)),
            ("batchSize: 8\nmaxBatchDelay: 10", {"batch_size": 4}, (4, 10)),
            ("batchSize: 8", {"batch_size": 0, "max_batch_delay": 0}, (8, None)),
            ("maxBatchDelay: 10", {"batch_size": -1, "max_batch_delay": -10000}, (1, 10)),
            ("batchSize: 0\nmaxBatchDelay: 0", {}, (1, None)),
        ],
    )
    def test_batch_size_and_delay_are_first_the_callers(self, config, asked, expected):
        one = made(config, **asked)
        assert (one.batch_size, one.max_batch_delay) == expected

    @pytest.mark.parametrize(
        ("config", "asked", "expected"),
        [
            ("", {}, (7, 8)),
            ("", {"response_timeout": 30, "startup_timeout": 40}, (30, 40)),
            ("", {"response_timeout": -1, "startup_timeout": 0}, (7, 8)),
            ("responseTimeout: 3", {"response_timeout": 30, "startup_timeout": 40}, (3, 40)),
            ("startupTimeout: 4", {"response_timeout": 30, "startup_timeout": 40}, (30, 4)),
            ("batchSize: 2", {"response_timeout": 30}, (30, 8)),
            ("responseTimeout: 0\nstartupTimeout: -1", {}, (7, 8)),
        ],
    )
    def test_time_outs_are_the_files_only_where_it_has_the_key(self, config, asked, expected):
        one = made(config, {"runtime": {"default_response_timeout": 7, "default_startup_timeout": 8}}, **asked)
        assert (one.response_timeout, one.startup_timeout) == expected

    @pytest.mark.parametrize(
        ("config", "asked", "default", "at_startup", "expected"),
        [
            ("", {}, 0, False, (0, 0)),
            ("", {}, 2, False, (2, 2)),
            ("", {}, 0, True, (1, 1)),
            ("", {}, 2, True, (2, 2)),
            ("", {}, -1, True, (1, 1)),
            ("", {"initial_workers": 3}, 2, False, (3, 3)),
            ("", {"initial_workers": 0}, 2, False, (0, 0)),
            ("", {"initial_workers": -1}, 2, False, (0, 0)),
            ("minWorkers: 2\nmaxWorkers: 5", {"initial_workers": 3}, 1, True, (2, 5)),
            ("minWorkers: 2", {"initial_workers": 3}, 0, False, (2, 2)),
            ("minWorkers: 0\nmaxWorkers: 2", {}, 0, False, (1, 2)),
            ("minWorkers: 4\nmaxWorkers: 2", {"initial_workers": 3}, 0, False, (3, 3)),
            ("maxWorkers: 2", {"initial_workers": 3}, 0, False, (3, 3)),
        ],
    )
    def test_workers_are_first_the_files(self, config, asked, default, at_startup, expected):
        one = made(config, {"runtime": {"default_workers_per_model": default}}, at_startup, **asked)
        assert (one.min_workers, one.max_workers) == expected
        assert one.loaded_at_startup is at_startup

    @pytest.mark.parametrize(
        ("config", "asked", "at_startup", "expected"),
        [
            ("", {}, True, (2, 3, 4, 50, 60, 70)),
            ("", {}, False, (0, 0, 4, 50, 60, 70)),
            ("", {"initial_workers": 1}, True, (1, 1, 4, 50, 60, 70)),
            ("", {"batch_size": 8, "max_batch_delay": 9, "response_timeout": 8}, True, (2, 3, 8, 9, 60, 70)),
            ("minWorkers: 5\nbatchSize: 6\nmaxBatchDelay: 7\nresponseTimeout: 8", {}, True, (5, 5, 6, 7, 8, 70)),
        ],
    )
    def test_control_models_speaks_of_one_version(self, config, asked, at_startup, expected):
        own = {"min_workers": 2, "max_workers": 3, "batch_size": 4, "max_batch_delay": 50}
        own |= {"response_timeout": 60, "startup_timeout": 70}
        settings = {"control": {"models": {"m": {"1.0": own}, "other": {"1.0": {"min_workers": 9}}}}}
        one = made(config, settings, at_startup, **asked)
        assert (one.min_workers, one.max_workers, one.batch_size, one.max_batch_delay) == expected[:4]
        assert (one.response_timeout, one.startup_timeout) == expected[4:]
        another = made(config, settings, at_startup, {"version": "2.0"}, **asked)
        assert another.startup_timeout == 120

    def test_what_only_the_file_says(self):
        config = """
            maxRetryTimeoutInSec: 9
            clientTimeoutInMills: 50
            jobQueueSize: 7
            deviceType: gpu
            deviceIds: [1, 2]
            batcher: ray
            num_cpus: 0
            num_gpus: 0.5
            retries: false
            fast_path: oip
            max_ongoing_requests: 12
            maxConcurrentRequests: 3
            handler: {mapping: {0: cat}}
            useJobTicket: true
            useVenv: true
            parallelType: tp
            parallelLevel: 2
            continuousBatching: true
            sequenceBatching: true
            sequenceMaxIdleMSec: 3
            sequenceTimeoutMSec: 4
            maxNumSequence: 5
            maxSequenceJobQueueSize: 6
        """
        one = made(config)
        assert (one.use_job_ticket, one.use_venv, one.continuous_batching, one.sequence_batching) == (True,) * 4
        assert (one.parallel_type, one.parallel_level) == ("tp", 2)
        assert (one.sequence_max_idle, one.sequence_timeout) == (3, 4)
        assert (one.max_num_sequence, one.max_sequence_job_queue_size) == (5, 6)
        assert (one.max_retry_timeout, one.client_timeout, one.job_queue_size) == (9, 50, 7)
        assert (one.device_type, one.device_ids) == ("gpu", (1, 2))
        assert (one.batcher, one.num_cpus, one.num_gpus, one.retries) == ("ray", 0.0, 0.5, False)
        assert (one.fast_path, one.max_ongoing_requests, one.max_concurrent_requests) == ("oip", 12, 3)
        assert one.config["handler"] == {"mapping": {0: "cat"}}
        assert one.config["deviceIds"] == [1, 2]

    def test_each_rank_of_a_sharded_model_claims_whole_gpus(self):
        config = "tensor_parallel: 2\npipeline_parallel: 3\nplacement_strategy: SPREAD"
        one = made(config, {"runtime": {"num_gpus": 0.25}})
        assert (one.ranks, one.num_gpus, one.placement_strategy) == (6, 1.0, "SPREAD")
        assert made("tensor_parallel: 2").num_gpus == 0.0
        assert (made("").ranks, made("").placement_strategy) == (1, "STRICT_PACK")
        with pytest.raises(ConfigurationError, match="num_gpus: 0.5; a rank of a sharded model has one GPU to itself"):
            made("tensor_parallel: 2\nnum_gpus: 0.5")

    def test_the_settings_speak_where_the_file_does_not(self):
        settings = {"runtime": {"job_queue_size": 5, "num_cpus": 2, "num_gpus": 0.25}}
        one = made("batchSize: 2", settings)
        assert (one.job_queue_size, one.num_cpus, one.num_gpus) == (5, 2.0, 0.25)

    @pytest.mark.parametrize(
        ("config", "gpus"), [("deviceType: cpu", 0.0), ("deviceType: gpu", 0.25), ("deviceType: cpu\nnum_gpus: 1", 1.0)]
    )
    def test_a_model_for_the_cpu_claims_no_gpu_that_nobody_asked_for(self, config, gpus):
        assert made(config, {"runtime": {"num_gpus": 0.25}}).num_gpus == gpus

    @pytest.mark.parametrize(
        ("config", "gpus"),
        [
            ("parallelType: custom\nparallelLevel: 2", 2.0),
            ("parallelType: tp\nparallelLevel: 2", 0.25),
            ("parallelLevel: 2", 0.25),
            ("parallelType: custom\nparallelLevel: 2\ndeviceType: cpu", 0.0),
            ("parallelType: custom\nparallelLevel: 2\nnum_gpus: 1", 1.0),
        ],
    )
    def test_a_level_of_custom_parallelism_is_a_number_of_gpus(self, config, gpus):
        assert made(config, {"runtime": {"num_gpus": 0.25}}).num_gpus == gpus

    @pytest.mark.parametrize(
        ("config", "setting", "installed"),
        [("", False, ""), ("", True, "r.txt"), ("useVenv: true", False, "r.txt"), ("useVenv: false", True, "r.txt")],
    )
    def test_requirements_are_installed_where_the_file_or_the_setting_says_so(self, config, setting, installed):
        settings = {"runtime": {"install_py_dep_per_model": setting}}
        assert made(config, settings, manifest={"requirements_file": "r.txt"}).requirements == installed
        assert made(config, settings).requirements == ""

    @pytest.mark.parametrize("runtime", ["python2", "Python", "java"])
    def test_a_runtime_that_is_none(self, runtime):
        for asked in ({"runtime": runtime}, {"manifest": {"runtime": runtime}}):
            with pytest.raises(BadRequest, match=f"^Invalid RuntimeType value: {runtime}$"):
                made(**asked)

    @pytest.mark.parametrize("name", ["a/b", "..", "-m", "m?", "m x", "ü", "m\n", "a#b", "a%2f"])
    def test_a_name_that_cannot_be_part_of_a_route(self, name):
        for asked in ({"model_name": name}, {"manifest": {"model_name": name}}, {"manifest": {"version": name}}):
            with pytest.raises(BadRequest, match="cannot be part of a route"):
                made(**asked)

    def test_a_name_that_would_not_fit_into_a_file_name(self):
        assert made(model_name="m" * 95).name == "m" * 95
        with pytest.raises(BadRequest, match="is too long: name and version together have at most 98"):
            made(model_name="m" * 96)

    def test_crosses_processes(self):
        one = made("batchSize: 2")
        assert pickle.loads(pickle.dumps(one)) == one
