"""Tests of the registration of TorchServe's archives of large models: which keys they get, and warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import ConfigurationError, InvalidArchive
from serve_app.model_store.archive import MANIFEST, Archive, ModelConfig
from serve_app.model_store.model_check import check_model
from tests.support.requirements import needs_no_package

pytestmark = needs_no_package("vllm")

Check = Callable[..., ModelConfig]
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that registers an archive with a model in ``snapshot`` and returns its config."""

    def check_archive(handler: str, config: dict[str, Any], **files: str) -> ModelConfig:
        model = {"modelName": "m", "handler": handler, "configFile": "c.yaml"}
        if "requirements.txt" in files:
            model["requirementsFile"] = "requirements.txt"
        contents = {MANIFEST: json.dumps({"model": model}), "c.yaml": yaml.safe_dump(config), **files}
        contents |= {"snapshot/config.json": json.dumps(SIZES), "snapshot/model.safetensors": ""}
        for name, text in contents.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return check_model(Archive.read(tmp_path, "m.mar"))

    return check_archive


def vllm_config(**arguments: Any) -> dict[str, Any]:
    return {"handler": {"model_path": "snapshot", "vllm_engine_config": arguments}}


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        ({}, {}),
        ({"max_num_seqs": 16, "max_model_len": 250}, {"page_size": 256, "num_blocks": 16}),
        ({"max_num_seqs": 256, "max_model_len": 1000}, {"page_size": 256, "num_blocks": 128}),
        ({"max_num_seqs": 2, "max_model_len": 65536}, {"page_size": 256, "num_blocks": 256}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        (
            {"dtype": "bfloat16", "max_num_batched_tokens": 512},
            {"dtype": "bfloat16", "max_batch_tokens": 512},
        ),
        (
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 32},
            {"max_adapters": 4, "max_adapter_rank": 32},
        ),
        ({"quantization": None, "load_format": "auto", "trust_remote_code": False}, {}),
    ],
)
def test_vllms_arguments_are_translated(check: Check, arguments: Any, engine: dict[str, Any]) -> None:
    config = check("vllm_handler", vllm_config(**arguments))
    assert config.raw["engine"] == {"name": "transformers", **engine}
    assert (config.num_gpus, config.tensor_parallel) == (None, None)


def test_adapters_and_ranks_are_translated(check: Check) -> None:
    file = vllm_config(tensor_parallel_size=2)
    file["handler"]["adapters"] = {"one": "adapters/one"}
    config = check("vllm_handler", {**file, "parallelType": "tp", "parallelLevel": 2})
    assert config.raw["engine"] == {"name": "transformers", "adapters": {"one": "adapters/one"}}
    assert (config.tensor_parallel, config.raw["tensor_parallel"], config.unserved) == (2, 2, [])
    with pytest.raises(ConfigurationError, match="tensor_parallel: 3 does not divide 4 attention heads"):
        check("vllm_handler", vllm_config(tensor_parallel_size=3))


def test_vllm_serves_where_the_archive_installs_it(check: Check) -> None:
    file = {**vllm_config(max_model_len=250, quantization="awq", tensor_parallel_size=2), "useVenv": True}
    config = check("vllm_handler", file, **{"requirements.txt": "# engine\nvllm==0.9.1\n"})
    arguments = {"max_model_len": 250, "quantization": "awq", "tensor_parallel_size": 2}
    assert config.raw["engine"] == {"name": "vllm", "arguments": arguments}
    assert (config.num_gpus, config.tensor_parallel) == (2, None)
    config = check("vllm_handler", {**vllm_config(), "engine": {"name": "vllm"}, "num_gpus": 0.5})
    assert config.raw["engine"] == {"name": "vllm", "arguments": {}}
    assert config.num_gpus == 0.5, "the file's own keys take precedence"


def test_what_was_replaced_is_logged(check: Check, caplog: Any) -> None:
    file = vllm_config(gpu_memory_utilization=0.5, enforce_eager=True, max_num_seqs=8)
    file["handler"]["adaptors"] = {}
    check("vllm_handler", file)
    assert "m.mar/c.yaml: vLLM is not installed: the engine transformers" in caplog.text
    assert "gpu_memory_utilization has no effect: num_gpus below 1 limits the memory" in caplog.text
    assert "enforce_eager has no effect: remove it" in caplog.text
    assert "max_num_seqs has no effect: engine: num_blocks limits" in caplog.text
    assert "'adaptors' is not known and has no effect. Did you mean 'adapters'?" in caplog.text


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (vllm_config(quantization="awq"), "quantization: 'awq' needs vLLM: save the weights unquantized"),
        (vllm_config(trust_remote_code=True), "trust_remote_code: True needs vLLM: llm runs no code"),
        (vllm_config(pipeline_parallel_size=2), "pipeline_parallel_size: 2 .* set tensor_parallel_size"),
        (vllm_config(speculative_model="x/y"), "llm has no speculative decoding"),
        (vllm_config(max_modellen=5), "'max_modellen' is not known, .* Did you mean 'max_model_len'"),
        (vllm_config(max_model_len="long"), "max_model_len is 'long'; it is a whole number from 1"),
        (vllm_config(max_loras="many"), "max_loras is 'many'; it is a whole number from 1"),
        ({"handler": {}}, "neither handler: model_path nor vllm_engine_config: model names the model"),
        ({"handler": {"model_path": "snapshot", "vllm_engine_config": [1]}}, "it is a mapping"),
        ({"handler": "x"}, "handler is 'x'; it is a mapping"),
    ],
)
def test_keys_that_change_results_are_refused(check: Check, file: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check("vllm_handler", file)


def test_a_class_of_an_archive_gets_the_keys_of_its_base(check: Check) -> None:
    source = "from ts.torch_handler.vllm_handler import VLLMHandler\nclass Own(VLLMHandler): ...\n"
    config = check("own.py", vllm_config(tensor_parallel_size=2), **{"own.py": source})
    assert (config.tensor_parallel, config.raw["engine"]) == (2, {"name": "transformers"})


@needs_no_package("tensorrt_llm")
def test_trt_llm_archives_fall_back_to_the_tokenizers_folder(check: Check) -> None:
    config = check("trt_llm_handler", {"handler": {"tokenizer_dir": "snapshot", "engine_dir": "engine"}})
    assert config.raw["engine"] == {"name": "transformers"}
    with pytest.raises(ConfigurationError, match=r"needs tensorrt_llm, .*pip install tensorrt_llm"):
        check("trt_llm_handler", {"handler": {"tokenizer_dir": "tokenizer", "engine_dir": "engine"}})
    with pytest.raises(ConfigurationError, match="needs tokenizer_dir and engine_dir"):
        check("trt_llm_handler", {"handler": {"engine_dir": "engine"}})


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("ts.torch_handler.distributed.base_deepspeed_handler", "BaseDeepSpeedHandler", "tp"),
        ("ts.torch_handler.distributed.base_pippy_handler", "BasePippyHandler", "pp"),
        ("ts.handler_utils.distributed.deepspeed", "get_ds_engine", "tp"),
        ("mii", "pipeline", "tp"),
    ],
)
def test_sharded_bases_get_the_processes_of_torchrun(check: Check, module: str, name: str, kind: str) -> None:
    file = {"parallelType": kind, "deviceType": "gpu", "torchrun": {"nproc-per-node": 4}}
    config = check("own.py", file, **{"own.py": f"from {module} import {name}\n"})
    assert (config.tensor_parallel, config.pipeline_parallel) == ((4, None) if kind == "tp" else (None, 4))
    assert config.sharded and config.unserved == []


def test_a_missing_deepspeed_configuration_is_refused(check: Check) -> None:
    source = "from ts.handler_utils.distributed.deepspeed import get_ds_engine\n"
    file = {"deepspeed": {"config": "ds-config.json"}}
    with pytest.raises(InvalidArchive, match=r"ds-config\.json is not in the archive; add it"):
        check("own.py", file, **{"own.py": source})
    check("own.py", file, **{"own.py": source, "ds-config.json": "{}"})
    check("own.py", {"deepspeed": "ds-config.json"}, **{"own.py": source})


def test_archives_that_drive_pippy_get_its_replacement(check: Check, caplog: Any) -> None:
    check("own.py", {}, **{"own.py": "from pippy import split_into_equal_size\n"})
    assert "own.py imports pippy. PiPPy is discontinued." in caplog.text
    assert "torch.distributed.pipelining" in caplog.text
