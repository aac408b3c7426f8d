"""DeepSpeed-MII for ``causal_lm``: ragged batches on NVIDIA GPUs.

MII's own server process is not started: every rank creates a pipeline, and rank 0's schedules for all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from handlers import extras
from handlers.distributed import process_group
from handlers.engines.batch_decoding import RowDecoder
from handlers.errors import HandlerLoadError

_PREFILL_CHUNK = 256  # prompt tokens per forward where the logits are requested


class _PassthroughTokenizer:
    """A tokenizer for MII that returns token ids unchanged."""

    eos_token_id = -1  # the rows recognize their end tokens

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens)

    def decode(self, tokens: Any) -> list[int]:
        return [int(token) for token in tokens]


class RaggedEngine:
    """A model, or this rank's part of it, in MII's inference ``engine``.

    Every rank runs the same calls in the same order. Rank 0 has the results. ``settings`` is MII's
    ModelConfig.
    """

    device = torch.device("cpu")  # of the inputs; MII copies them to the GPU

    def __init__(self, engine: Any, config: Any, generation_config: Any, settings: Any) -> None:
        from mii.batching import MIIPipeline

        rank = dist.get_rank() if dist.is_initialized() else 0

        class Pipeline(MIIPipeline):
            # MII derives it from the device's index, and each of our ranks sees one GPU with index 0.
            local_rank = rank
            rows: Sequence[RowDecoder] = ()

            # MII's own sampling has neither seeds nor penalties, and its stop strings are single tokens.
            def _process_logits(
                self, next_token_logits: torch.Tensor, running_requests: Any
            ) -> tuple[torch.Tensor, torch.Tensor]:
                tokens, finished = torch.zeros((2, len(running_requests)), dtype=torch.long)
                for index, request in enumerate(running_requests):
                    if request.last_in_prompt:
                        row = self.rows[request.uid]
                        token = row.choose(next_token_logits[index, : config.vocab_size].float())
                        tokens[index] = max(token, 0)  # it may be NO_TOKEN
                        finished[index] = row.append(token)
                return tokens, finished.bool()

        self.config = config
        self.generation_config = generation_config
        self._is_first_rank = rank == 0
        self._engine = engine
        if dist.is_initialized():
            # Rank 0's pipeline waits a second for the others', and their loading may take longer.
            dist.barrier()
        tokenizer = _PassthroughTokenizer(config.vocab_size)
        self._pipeline = Pipeline(inference_engine=engine, tokenizer=tokenizer, model_config=settings)

    def eval(self) -> RaggedEngine:
        return self

    def decode_rows(self, inputs: Mapping[str, torch.Tensor], rows: Sequence[RowDecoder]) -> None:
        """Generate until all rows are finished; ``inputs`` are their padded prompts.

        Rank 0 chooses the tokens, and MII broadcasts them to the other ranks, whose rows stay empty.
        """
        self._pipeline.rows = rows
        self._pipeline(
            [row.prompt for row in rows] if self._is_first_rank else [],
            max_new_tokens=max(row.max_new_tokens for row in rows),
            do_sample=False,
        )

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
            "OPT and Falcon, in the float16 or bfloat16 of their config.json; others have engine: {name: "
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
