from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from serve_app.control.archive_ingestion import build_spec
from serve_app.domain.model import ModelRef, ModelSpec, Registration
from serve_app.errors import (
    BadRequest,
    ConfigurationError,
)
from serve_app.model_store.archive import Archive, Manifest, ModelConfig
from serve_app.settings import load


def made(
    config: str = "",
    settings: dict | None = None,
    at_startup: bool = False,
    manifest: dict | None = None,
    **requested,
) -> ModelSpec:
    """Build the spec of an archive with this model-config.yaml, under these settings."""
    return build_spec(
        Registration("m.mar", **requested),
        Archive(
            "m.mar",
            Path(),
            Manifest(**{"model_name": "m", "handler": "handler.py", **(manifest or {})}),
            digest="d" * 64,
            uri="file:///cache/m",
        ),
        ModelConfig.parse(config),
        load(settings),
        at_startup,
    )


class TestSpecFrom:
    def test_nobody_says_anything(self):
        one = made()
        assert one == ModelSpec("m", "1.0", "m.mar", "d" * 64, "file:///cache/m", handler="handler.py")
        assert (one.batch_size, one.max_batch_delay, one.response_timeout, one.startup_timeout) == (
            1,
            None,
            120,
            120,
        )

    def test_the_callers_names_win_over_the_manifests(self):
        theirs = made(manifest={"version": "2", "handler": "h", "runtime": "python3"})
        assert (theirs.ref, theirs.handler, theirs.runtime) == (ModelRef("m", "2"), "h", "python3")
        callers = made(model_name="n", handler="mine.py:go", runtime="LSP")
        assert (callers.ref, callers.handler, callers.runtime) == (ModelRef("n", "1.0"), "mine.py:go", "LSP")

    @pytest.mark.parametrize(
        ("config", "requested", "expected"),
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
    def test_batch_size_and_delay_are_first_the_callers(self, config, requested, expected):
        one = made(config, **requested)
        assert (one.batch_size, one.max_batch_delay) == expected

    @pytest.mark.parametrize(
        ("config", "requested", "expected"),
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
    def test_time_outs_are_the_files_only_where_it_has_the_key(self, config, requested, expected):
        one = made(
            config, {"runtime": {"default_response_timeout": 7, "default_startup_timeout": 8}}, **requested
        )
        assert (one.response_timeout, one.startup_timeout) == expected

    @pytest.mark.parametrize(
        ("config", "requested", "default", "at_startup", "expected"),
        [
            ("", {}, 0, False, (0, 0)),
            ("", {}, 2, False, (2, 2)),
            ("", {}, 0, True, (1, 1)),
            ("", {}, 2, True, (2, 2)),
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
    def test_workers_are_first_the_files(self, config, requested, default, at_startup, expected):
        one = made(config, {"runtime": {"default_workers_per_model": default}}, at_startup, **requested)
        assert (one.min_workers, one.max_workers) == expected
        assert one.loaded_at_startup is at_startup

    @pytest.mark.parametrize(
        ("config", "requested", "at_startup", "expected"),
        [
            ("", {}, True, (2, 3, 4, 50, 60, 70)),
            ("", {}, False, (0, 0, 4, 50, 60, 70)),
            ("", {"initial_workers": 1}, True, (1, 1, 4, 50, 60, 70)),
            ("", {"batch_size": 8, "max_batch_delay": 9, "response_timeout": 8}, True, (2, 3, 8, 9, 60, 70)),
            (
                "minWorkers: 5\nbatchSize: 6\nmaxBatchDelay: 7\nresponseTimeout: 8",
                {},
                True,
                (5, 5, 6, 7, 8, 70),
            ),
        ],
    )
    def test_control_models_speaks_of_one_version(self, config, requested, at_startup, expected):
        own = {"min_workers": 2, "max_workers": 3, "batch_size": 4, "max_batch_delay": 50}
        own |= {"response_timeout": 60, "startup_timeout": 70}
        settings = {"control": {"models": {"m": {"1.0": own}, "other": {"1.0": {"min_workers": 9}}}}}
        one = made(config, settings, at_startup, **requested)
        assert (one.min_workers, one.max_workers, one.batch_size, one.max_batch_delay) == expected[:4]
        assert (one.response_timeout, one.startup_timeout) == expected[4:]
        another = made(config, settings, at_startup, {"version": "2.0"}, **requested)
        assert another.startup_timeout == 120

    def test_what_only_the_file_says(self):
        config = """
            maxRetryTimeoutInSec: 9
            clientTimeoutInMills: 50
            jobQueueSize: 7
            deviceType: gpu
            deviceIds: [1, 2]
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
        assert (one.use_job_ticket, one.use_venv, one.continuous_batching, one.sequence_batching) == (
            True,
        ) * 4
        assert (one.parallel_type, one.parallel_level) == ("tp", 2)
        assert (one.sequence_max_idle, one.sequence_timeout) == (3, 4)
        assert (one.max_num_sequence, one.max_sequence_job_queue_size) == (5, 6)
        assert (one.max_retry_timeout, one.client_timeout, one.job_queue_size) == (9, 50, 7)
        assert (one.device_type, one.device_ids) == ("gpu", (1, 2))
        assert (one.num_cpus, one.num_gpus, one.retries) == (0.0, 0.5, False)
        assert (one.fast_path, one.max_ongoing_requests, one.max_concurrent_requests) == ("oip", 12, 3)
        assert one.config["handler"] == {"mapping": {0: "cat"}}
        assert one.config["deviceIds"] == [1, 2]

    def test_the_batcher_of_the_file_has_precedence_over_the_settings(self):
        every = {"runtime": {"batcher": "ray"}}
        assert made().batcher == "torchrelay"
        assert made("batcher: ray").batcher == "ray"
        assert made(settings=every).batcher == "ray"
        assert made("batcher: torchrelay", every).batcher == "torchrelay"
        assert made("tensor_parallel: 2", every).batcher == "ray"

    def test_routing_is_by_prefix_where_the_handler_caches_prefixes(self):
        llm = {"handler": "llm"}
        assert made().routing == "load"
        assert made(manifest=llm).routing == made(handler="llm").routing == "prefix"
        assert made(handler="vllm_handler").routing == "prefix"
        assert made("engine: {prefix_caching: false}", manifest=llm).routing == "load"
        assert made("engine: {prefix_caching: true}", manifest=llm).routing == "prefix"
        assert made("sequenceBatching: true", manifest=llm).routing == "load"
        assert made("routing: load", manifest=llm).routing == "load"
        assert made("routing: prefix").routing == "prefix"

    @pytest.mark.parametrize(
        "key", ["sequenceBatching", "continuousBatching", "useJobTicket", "bucket_by_length"]
    )
    def test_rays_batcher_refuses_what_it_cannot_serve(self, key):
        every = {"runtime": {"batcher": "ray"}}
        manifest = {"config_file": "model-config.yaml"}
        with pytest.raises(ConfigurationError) as refused:
            made(f"{key}: true", every, manifest=manifest)
        assert str(refused.value).startswith(f"m.mar/model-config.yaml: {key}: ")
        assert "runtime.batcher: ray in the settings selects @serve.batch" in str(refused.value)
        assert "write batcher: torchrelay" in str(refused.value)
        with pytest.raises(ConfigurationError, match="; batcher: ray selects"):
            made(f"{key}: true\nbatcher: ray", manifest=manifest)
        assert made(f"{key}: true\nbatcher: torchrelay", every).batcher == "torchrelay"
        assert made(f"{key}: false", every).batcher == "ray"

    def test_each_rank_of_a_sharded_model_claims_whole_gpus(self):
        config = "tensor_parallel: 2\npipeline_parallel: 3\nplacement_strategy: SPREAD"
        one = made(config, {"runtime": {"num_gpus": 0.25}})
        assert (one.ranks, one.num_gpus, one.placement_strategy) == (6, 1.0, "SPREAD")
        assert made("tensor_parallel: 2").num_gpus == 0.0
        assert (made("").ranks, made("").placement_strategy) == (1, "STRICT_PACK")
        with pytest.raises(
            ConfigurationError, match=r"num_gpus: 0.5; a rank of a sharded model has one GPU to itself"
        ):
            made("tensor_parallel: 2\nnum_gpus: 0.5")

    def test_the_settings_speak_where_the_file_does_not(self):
        settings = {"runtime": {"job_queue_size": 5, "num_cpus": 2, "num_gpus": 0.25}}
        one = made("batchSize: 2", settings)
        assert (one.job_queue_size, one.num_cpus, one.num_gpus) == (5, 2.0, 0.25)

    @pytest.mark.parametrize(
        ("config", "gpus"),
        [("deviceType: cpu", 0.0), ("deviceType: gpu", 0.25), ("deviceType: cpu\nnum_gpus: 1", 1.0)],
    )
    def test_a_cpu_model_claims_no_unrequested_gpu(self, config, gpus):
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
        [
            ("", False, ""),
            ("", True, "r.txt"),
            ("useVenv: true", False, "r.txt"),
            ("useVenv: false", True, "r.txt"),
        ],
    )
    def test_requirements_are_installed_where_the_file_or_the_setting_says_so(
        self, config, setting, installed
    ):
        settings = {"runtime": {"install_py_dep_per_model": setting}}
        assert made(config, settings, manifest={"requirements_file": "r.txt"}).requirements == installed
        assert made(config, settings).requirements == ""

    @pytest.mark.parametrize("runtime", ["python2", "Python", "java"])
    def test_a_runtime_that_is_none(self, runtime):
        for requested in ({"runtime": runtime}, {"manifest": {"runtime": runtime}}):
            with pytest.raises(BadRequest, match=f"^Invalid RuntimeType value: {runtime}$"):
                made(**requested)

    @pytest.mark.parametrize("name", ["a/b", "..", "-m", "m?", "m x", "ü", "m\n", "a#b", "a%2f"])
    def test_a_name_that_cannot_be_part_of_a_route(self, name):
        for requested in (
            {"model_name": name},
            {"manifest": {"model_name": name}},
            {"manifest": {"version": name}},
        ):
            with pytest.raises(BadRequest, match="cannot be part of a route"):
                made(**requested)

    def test_a_name_that_would_not_fit_into_a_file_name(self):
        assert made(model_name="m" * 95).name == "m" * 95
        with pytest.raises(BadRequest, match="is too long: name and version together have at most 98"):
            made(model_name="m" * 96)

    def test_crosses_processes(self):
        one = made("batchSize: 2")
        assert pickle.loads(pickle.dumps(one)) == one
