"""model-config.yaml: its keys, values and errors."""

import dataclasses
import logging
import zipfile

import pytest
import yaml

from serve_app.domain import limits
from serve_app.domain.model import ModelSpec
from serve_app.errors import ConfigurationError, LimitExceeded
from serve_app.model_store.archive import Archive, ModelConfig
from serve_app.model_store.model_check import check_model
from serve_app.settings import Settings
from tests.support.archives import ECHO, make_archive


def parse(text: str) -> ModelConfig:
    return ModelConfig.parse(text, "echo.mar/c.yaml")


def test_every_key_is_read():
    config = parse("""
        minWorkers: 0
        maxWorkers: 4
        batchSize: 0
        deviceIds: [0, 1]
        useVenv: true
        torchrun: {nproc-per-node: 2}
        batcher: ray
        num_cpus: 1
        num_gpus: 0.25
        retries: false
        fast_path: oip
        routing: prefix
        max_ongoing_requests: 7
        maxConcurrentRequests: 4
        samples: [a.json]
        trusted: true
        handler: {anything: at all}
        1: a key that is no text
    """)
    assert (config.min_workers, config.max_workers, config.batch_size) == (
        1,
        4,
        1,
    )  # at least one, as TorchServe
    assert (config.device_ids, config.use_venv, config.torchrun) == ((0, 1), True, {"nproc-per-node": 2})
    assert (config.batcher, config.num_cpus, config.num_gpus, config.retries) == ("ray", 1.0, 0.25, False)
    assert (config.fast_path, config.max_ongoing_requests, config.samples) == ("oip", 7, ("a.json",))
    assert (config.max_concurrent_requests, config.routing) == (4, "prefix")
    assert config.trusted is True
    assert config.raw["handler"] == {"anything": "at all"} and config.raw["minWorkers"] == 0
    assert config.response_timeout is None and config.startup_timeout is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_configuration(text):
    assert parse(text) == ModelConfig()


@pytest.mark.parametrize(
    "line",
    [
        "batchSize: four", "batchSize: true", "maxBatchDelay: 0", "responseTimeout: -5",
        "responseTimeout: 1.5",
        "deviceType: tpu", "deviceIds: [0, x]", "useVenv: 1", "parallelType: xx", "torchrun: 3",
        "deviceType: [cpu]",
    ],
)  # fmt: skip
def test_a_wrong_value_of_torchserves_is_ignored_with_a_warning(line, caplog):
    with caplog.at_level(logging.WARNING):
        config = parse(line)
    assert dataclasses.replace(config, raw={}) == ModelConfig()
    assert "echo.mar/c.yaml" in caplog.text and line.partition(":")[0] in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "batcher: fast", "num_cpus: -1", "num_gpus: lots", "num_gpus: .inf", "num_gpus: .nan",
        "num_cpus: true",
        "retries: 3", "fast_path: /x", "max_ongoing_requests: 1.5", "maxConcurrentRequests: -1",
        "samples: one.json", "samples: [1]",
        "trusted: 'no'", "profile: 3", "profile: {active: 0}", "task: [ner]", "batcher: [ray]",
        "tensor_parallel: 0", "pipeline_parallel: two", "placement_strategy: strict_pack",
        "routing: random",
    ],
)  # fmt: skip
def test_a_wrong_value_of_ours_is_refused_in_our_section_and_else_the_authors(line, caplog):
    key = line.partition(":")[0]
    with pytest.raises(ConfigurationError, match=f"^echo.mar/c.yaml: torchrelay: {key}: .* must be "):
        parse(f"torchrelay: {{{line}}}")
    if "{" in line:
        return
    with caplog.at_level(logging.WARNING):
        config = parse(line)
    assert dataclasses.replace(config, raw={}) == ModelConfig()
    value = yaml.safe_load(line)[key]
    assert repr(config.raw) == repr({} if key == "trusted" else {"torchrelay": {key: value}})  # NaN, too
    spec = ModelSpec("m", "1.0", "m.mar", "", "", config=config.raw)
    assert repr(spec.handler_config) == repr({} if key == "trusted" else {key: value})
    assert f"echo.mar/c.yaml: {key}: " in caplog.text


def test_a_mapping_with_a_wrong_key_of_ours_is_refused():
    with pytest.raises(ConfigurationError, match="profile"):
        parse("profile: {active: 0}")


def test_values_of_the_section_win_and_the_handler_has_its_own():
    config = parse("pin: 1234\nnum_cpus: 1\ntorchrelay: {pin: true, num_cpus: 2, batchSize: 4}")
    assert (config.pin, config.num_cpus, config.batch_size) == (True, 2.0, 4)
    spec = ModelSpec("m", "1.0", "m.mar", "", "", config=config.raw)
    assert (spec.config["pin"], spec.config["num_cpus"]) == (True, 2)
    assert spec.handler_config == {"pin": 1234, "num_cpus": 1, "batchSize": 4}


@pytest.mark.parametrize(
    "text", ["torchrelay: {trusted: true}", "{torchrelay: {trusted: false}, trusted: true}"]
)
def test_no_file_decides_about_its_own_trust(text, tmp_path):
    archive = make_archive(tmp_path, "m", ECHO, config=yaml.safe_load(text))
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path / "m")
    config = check_model(Archive.read(tmp_path / "m", "m.mar"))
    assert config.trusted is None
    assert "trusted" not in ModelSpec("m", "1.0", "m.mar", "", "", config=config.raw).handler_config


def test_numbers_of_the_section_have_limits_and_count_everywhere():
    config = parse("torchrelay: {minWorkers: 5000000, tensor_parallel: 2}")
    assert config.sharded and config.raw == {"minWorkers": 5000000, "tensor_parallel": 2}
    with pytest.raises(LimitExceeded):
        limits.check(config.raw, Settings().limits, "c.yaml")


@pytest.mark.parametrize("section", ["3", "[a]", "{batchsize: 4}", "{unknown: 1}"])
def test_a_section_of_something_else_is_refused(section):
    with pytest.raises(ConfigurationError, match=r"^echo\.mar/c\.yaml: torchrelay"):
        parse(f"torchrelay: {section}")


@pytest.mark.parametrize(
    "key, near",
    [
        ("batchsize", "batchSize"), ("batch_size", "batchSize"), ("maxWorker", "maxWorkers"), ("num_gpu",
        "num_gpus"),
        ("numGpus", "num_gpus"), ("responseTimout", "responseTimeout"), ("handlers", "handler"), ("sample",
        "samples"),
    ],
)  # fmt: skip
def test_a_near_miss_is_the_authors_with_a_warning(key, near, caplog):
    with caplog.at_level(logging.WARNING):
        assert parse(f"{key}: 1").raw == {key: 1}
    assert f"echo.mar/c.yaml: {key!r} is left to the handler; did you mean {near!r}?" in caplog.text


@pytest.mark.parametrize(
    "key",
    ["handler", "pt2", "micro_batching", "pippy", "deepspeed", "tokenizer", "max_length", "device", "model"],
)
def test_a_key_of_the_handlers_is_kept(key):
    assert parse(f"{key}: {{a: 1}}").raw == {key: {"a": 1}}


@pytest.mark.parametrize(
    "text, line",
    [("a: 1\nb: [1, 2\n", "line 3"), ("a: 1\n\tb: 2\n", "line 2"), ("a: *b", "line 1"), ("- a\n", "line 1")],
)
def test_yaml_that_is_none_names_its_line(text, line):
    with pytest.raises(ConfigurationError, match=f"^echo.mar/c.yaml: {line}: "):
        parse(text)


@pytest.mark.parametrize(
    "text", [b"\xff\xfe\xff", b"a: \x00", b"a: 2020-99-99", b"a: !!python/object:os.system {}"]
)
def test_bytes_that_are_no_yaml(text):
    with pytest.raises(ConfigurationError, match=r"^echo.mar/c.yaml: "):
        ModelConfig.parse(text, "echo.mar/c.yaml")


def test_aliases_that_blow_up_are_refused():
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    for text in (laughs, "a: &a [*a]"):
        with pytest.raises(ConfigurationError, match="aliases"):
            parse(text)


def test_sequences_exclude_routing_by_prefix():
    with pytest.raises(ConfigurationError, match="routing and sequenceBatching: the sequence selects"):
        parse("routing: prefix\nsequenceBatching: true")
    assert parse("routing: load\nsequenceBatching: true").routing == "load"
