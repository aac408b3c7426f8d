"""Tests of archives on TorchServe's base handlers of DeepSpeed and PiPPy: two ranks answer as one process."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.torchserve_compat import names
from tests.support.rank_programs import run_ranks

pytestmark = pytest.mark.integration

COMMON = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

class Generation:
    def preprocess(self, requests):
        texts = [row.get("data") or row.get("body") for row in requests]
        return self.tokenizer(texts, return_tensors="pt").to(self.device)

    def inference(self, inputs):
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def postprocess(self, texts):
        return texts

    def load_empty(self, ctx):
        options = ctx.model_yaml_config["handler"]
        self.max_new_tokens = int(options["max_new_tokens"])
        path = options.get("tokenizer_path", options["model_path"])
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
"""
DEEPSPEED = """
from abc import ABC
from ts.context import Context
from ts.handler_utils.distributed.deepspeed import get_ds_engine
from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler
from common import Generation

class Sharded(Generation, BaseDeepSpeedHandler, ABC):
    def initialize(self, ctx: Context):
        super().initialize(ctx)
        self.model = get_ds_engine(self.load_empty(ctx), ctx).module
        self.initialized = True
"""
PIPPY = """
from abc import ABC
from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver
from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler
from common import Generation

class Pipelined(Generation, BasePippyHandler, ABC):
    def initialize(self, ctx):
        super().initialize(ctx)
        self.model = get_pipeline_driver(self.load_empty(ctx), self.world_size, ctx)
        self.initialized = True
"""
RANK = """
from pathlib import Path
import handlers
from handlers.context import Context
from handlers.torchserve_compat import names

folder, config = arguments
names.install()
os.chdir(folder)
manifest = {"model": {"handler": "handler.py"}}
entry = handlers.load("handler.py", Path(folder), manifest)
context = Context("m", folder, manifest, model_yaml_config=config)
entry.initialize(context)
context.begin(["a"], [{}], [{}])
held = sum(parameter.numel() for parameter in entry.instance.model.parameters())
result = [entry([{"body": "Once upon a"}], context), held]
"""
HANDLER = {"model_path": "model", "max_new_tokens": 12}
PIPELINE = {"model_type": "HF", "input_names": ["input_ids"], "chunks": 1, "rpc_timeout": 1800}
OPTIONS = {"dtype": "torch.float32", "replace_with_kernel_inject": True, "tensor_parallel": {"tp_size": 2}}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that writes an archive with a handler and a model."""
    from tests.support.hf_folders import save_byte_llama

    def write_archive(handler: str) -> Path:
        for name, text in (("common", COMMON), ("handler", handler)):
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        save_byte_llama(tmp_path / "model")
        (tmp_path / "ds-config.json").write_text(json.dumps(OPTIONS))
        return tmp_path

    return write_archive


def generate_whole(folder: Path) -> list[str]:
    from handlers.builtin.causal_lm import CausalLM

    model = CausalLM()
    model.initialize(Context("m", str(folder), {}))
    [value] = model.handle([{"body": {"prompt": "Once upon a", "max_new_tokens": 12}}], None)
    return ["Once upon a" + value["text"]]


@pytest.mark.nightly
def test_two_ranks_of_deepspeed_answer_as_one(write: Any) -> None:
    config = {"handler": HANDLER, "deepspeed": {"config": "ds-config.json", "checkpoint": "c.json"}}
    folder = write(DEEPSPEED)
    (first, held), (second, other) = run_ranks(RANK, str(folder), config)
    assert first == second == generate_whole(folder)
    assert held + other < 1.4 * count_parameters(folder), "each rank keeps its part of the layers"


@pytest.mark.nightly
def test_two_ranks_of_a_pipeline_answer_as_one(write: Any) -> None:
    folder = write(PIPPY)
    (first, _), (second, _) = run_ranks(RANK, str(folder), {"handler": HANDLER, "pippy": PIPELINE})
    assert first == second == generate_whole(folder)


def count_parameters(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "model").parameters())


def load(folder: Path, **config: Any) -> None:
    names.install()
    manifest = {"model": {"handler": "handler.py"}}
    entry = handlers.load("handler.py", folder, manifest)
    entry.initialize(Context("m", str(folder), manifest, model_yaml_config=config))


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        (DEEPSPEED, {}, r"get_ds_engine needs the key deepspeed"),
        (DEEPSPEED, {"deepspeed": {"config": "no.json"}}, r"no\.json: the DeepSpeed configuration cannot be"),
        (
            DEEPSPEED,
            {"deepspeed": {"config": "ds-config.json"}},
            r"tp_size 2, and the model runs in 1 process: set parallelType: tp and torchrun: ",
        ),
        (PIPPY, {}, r"pippy: model_type is None\. PiPPy is discontinued.*torch\.distributed\.pipelining"),
        (PIPPY, {"pippy": {**PIPELINE, "model_type": "other"}}, "model_type is 'other'"),
    ],
)
def test_impossible_configurations_are_rejected_with_the_cure(
    write: Any, monkeypatch: pytest.MonkeyPatch, source: str, config: Any, message: str
) -> None:
    folder = write(source)
    monkeypatch.chdir(folder)
    with pytest.raises(HandlerLoadError, match=message):
        load(folder, handler=HANDLER, **config)


def test_one_process_needs_no_ranks_and_a_missing_model_is_named(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(PIPPY)
    monkeypatch.chdir(folder)
    load(folder, handler=HANDLER, pippy=PIPELINE)
    options = {**HANDLER, "model_path": "x", "tokenizer_path": "model"}
    with pytest.raises(HandlerLoadError, match="model_path is 'x', which is no folder: archive the model's"):
        load(folder, handler=options, pippy=PIPELINE)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("pippy", "PiPPy is discontinued.*torch.distributed.pipelining"),
        ("mii", r"Install mii where the model runs: pip install 'torchrelay\[mii\]'"),
    ],
)
def test_a_missing_package_of_an_author_names_the_cure(archive: Any, package: str, message: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"needs an environment without {package}")
    folder = archive(handler=f"import {package}\n\nclass H:\n    def handle(self, data, context): ...\n")
    with pytest.raises(HandlerLoadError, match=message):
        handlers.load("handler.py", folder, {})
