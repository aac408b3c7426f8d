"""DeepSpeed-MII for ``causal_lm``: ragged batches on NVIDIA GPUs behind transformers' ``generate``.

MII's own server process is not started: every rank creates a pipeline, and rank 0's schedules for all.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from handlers import extras
from handlers.distributed import process_group
from handlers.errors import HandlerLoadError

_PREFILL_CHUNK = 256  # prompt tokens per forward where the logits are requested


class _PassthroughTokenizer:
    """A tokenizer for MII that returns token ids unchanged."""

    def __init__(self, vocab_size: int, end_token: int | None) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = -1 if end_token is None else end_token

    def encode(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens)

    def decode(self, tokens: Any) -> list[int]:
        return [int(token) for token in tokens]


class RaggedEngine:
    """A model, or this rank's part of it, in MII's inference ``engine`` with the interface of transformers.

    Every rank runs the same calls in the same order. Rank 0 returns the results; the other ranks' tokens are
    zeros. ``settings`` is MII's ModelConfig.
    """

    device = torch.device("cpu")  # of the inputs; MII copies them to the GPU

    def __init__(self, engine: Any, config: Any, generation_config: Any, settings: Any) -> None:
        from mii.batching import MIIPipeline

        rank = dist.get_rank() if dist.is_initialized() else 0

        class Pipeline(MIIPipeline):
            # MII derives it from the device's index, and each of our ranks sees one GPU with index 0.
            local_rank = rank

        self.config = config
        self.generation_config = generation_config
        end_token = generation_config.eos_token_id
        self._end_token = next(iter(end_token), None) if isinstance(end_token, list) else end_token
        self._is_first_rank = rank == 0
        self._engine = engine
        if dist.is_initialized():
            # Rank 0's pipeline waits a second for the others', and their loading may take longer.
            dist.barrier()
        tokenizer = _PassthroughTokenizer(config.vocab_size, self._end_token)
        self._pipeline = Pipeline(inference_engine=engine, tokenizer=tokenizer, model_config=settings)

    def eval(self) -> RaggedEngine:
        return self

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int, **_: Any
    ) -> torch.Tensor:
        """Append greedy tokens to the padded prompts; a row that ends early has its end token, then zeros."""
        prompts = _remove_padding(input_ids, attention_mask)
        responses = self._pipeline(  # the first rank broadcasts the prompts to the others
            prompts if self._is_first_rank else [],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            ignore_eos=self._end_token is None,
        )
        generated = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long)
        for row, response in zip(generated, responses):
            stopped = response.finish_reason == "stop"  # MII does not return the end token
            tokens = [*response.generated_text, *[self._end_token] * stopped]
            row[: len(tokens)] = torch.tensor(tokens)
        return torch.cat([input_ids, generated], 1)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        """Return the ``logits`` of the token after each prompt: rows x 1 x vocabulary."""
        rows = []
        for prompt in _remove_padding(input_ids, attention_mask):
            for chunk in torch.tensor(prompt).split(_PREFILL_CHUNK):
                last = self._engine.put([0], [chunk])
            self._engine.flush(0)
            rows.append(last[:, : self.config.vocab_size].cpu())
        return SimpleNamespace(logits=torch.stack(rows))


def load(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> RaggedEngine:
    """Load the causal language model in ``folder`` over ``tensor`` GPUs of one machine.

    Every rank calls it at the same time. Raises HandlerLoadError, with the cure, for what MII does not
    support: CPUs, pipeline parallelism, several machines, pickled weights (it would run them), number formats
    other than float16 and bfloat16, and unknown architectures.
    """
    if pipeline > 1:
        raise HandlerLoadError(
            "model-config.yaml: engine: mii cuts each layer up: give tensor_parallel and no "
            "pipeline_parallel. A "
            "pipeline has engine: {name: transformers}."
        )
    if gpu_id is None or not torch.cuda.is_available():
        raise HandlerLoadError(
            "model-config.yaml: engine: mii (DeepSpeed-MII) has kernels for NVIDIA GPUs alone, and this "
            "process has "
            "none. Give num_gpus: 1 where there are some; else take engine: {name: deepspeed} with "
            "tensor_parallel, "
            "or the handler llm, which batches as continuously."
        )
    if not extras.is_installed("mii"):
        raise HandlerLoadError(
            "model-config.yaml: engine: mii needs mii, which is not installed where the model runs: "
            f"{extras.install_command('mii')}"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", tensor)) != tensor:
        raise HandlerLoadError(
            "model-config.yaml: the ranks of engine: mii talk within one machine, and these lie on several. "
            "Take "
            "placement_strategy: STRICT_PACK, or engine: {name: transformers}."
        )
    if (folder / "ds_model_config.pkl").exists() or not any(folder.glob("*.safetensors")):
        raise HandlerLoadError(
            f"{folder}: engine: mii would run what is pickled in it. Save the model's weights as safetensors."
        )
    process_group.check_parallelism(folder, tensor, pipeline)
    return _load(folder, tensor)


def _load(folder: Path, tensor: int) -> RaggedEngine:
    from mii.config import ModelConfig
    from mii.modeling.models import load_model
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    request_port, group_port = _free_ports()
    settings = ModelConfig(
        model_name_or_path=str(folder),
        tensor_parallel=tensor,
        zmq_port_number=request_port,
        torch_dist_port=group_port,
    )
    try:
        engine = load_model(settings)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise HandlerLoadError(
            f"{folder}: DeepSpeed-MII cannot serve this model ({error}). It has Llama, Mistral, Mixtral, "
            "Qwen 2, Phi, "
            "OPT and Falcon, in float16 or bfloat16 as their config.json says; others have engine: {name: "
            "transformers}."
        ) from error
    return RaggedEngine(engine, config, generation, settings)


def _free_ports() -> list[int]:
    """Return two free ports of rank 0, broadcast to all ranks: MII's defaults collide between models."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
    if dist.is_initialized():
        dist.broadcast_object_list(ports)
    return ports


def _remove_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]
