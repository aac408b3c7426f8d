"""DeepSpeed-MII for ``causal_lm``: its ragged batches on NVIDIA GPUs, behind what transformers' ``generate`` is.

MII's own process is not started: every rank makes the pipeline of its part, and rank 0's schedules for all.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from handlers import sharding
from handlers.errors import HandlerLoadError

_PIECE = 256  # tokens of a prompt that are read at once where its logits are asked


class _Tokens:
    """What MII takes for a tokenizer: token ids stay what they are, in and out."""

    def __init__(self, vocabulary: int, end: int | None) -> None:
        self.vocab_size = vocabulary
        self.eos_token_id = -1 if end is None else end

    def encode(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens)

    def decode(self, tokens: Any) -> list[int]:
        return [int(token) for token in tokens]


class Ragged:
    """A model in MII's inference ``engine``, or this rank's part of it: ``generate`` and a call as transformers' have.

    Every rank runs the same calls in the same order. Rank 0's answers are the answers, and the other ranks' tokens
    are zeros. ``settings`` is MII's ModelConfig.
    """

    device = torch.device("cpu")  # where inputs are taken in; MII brings them to the GPU

    def __init__(self, engine: Any, config: Any, generation_config: Any, settings: Any) -> None:
        from mii.batching import MIIPipeline

        rank = dist.get_rank() if dist.is_initialized() else 0

        class Pipeline(MIIPipeline):
            local_rank = rank  # MII asks the device for its number, and each of our ranks sees one GPU, number 0

        self.config = config
        self.generation_config = generation_config
        end = generation_config.eos_token_id
        self._end = next(iter(end), None) if isinstance(end, list) else end
        self._first = rank == 0
        self._engine = engine
        if dist.is_initialized():
            dist.barrier()  # rank 0's pipeline waits a second for the others', and they may have had more to load
        tokens = _Tokens(config.vocab_size, self._end)
        self._pipeline = Pipeline(inference_engine=engine, tokenizer=tokens, model_config=settings)

    def eval(self) -> Ragged:
        return self

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int, **_: Any
    ) -> torch.Tensor:
        """Greedy tokens behind the padded prompts; a row that ends early has its end, and zeros to the longest."""
        prompts = _unpadded(input_ids, attention_mask)
        said = self._pipeline(  # ranks but the first are told by it what to run
            prompts if self._first else [],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            ignore_eos=self._end is None,
        )
        made = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long)
        for row, one in zip(made, said):
            ended = one.finish_reason == "stop"  # by a token that MII does not tell
            tokens = [*one.generated_text, *[self._end] * ended]
            row[: len(tokens)] = torch.tensor(tokens)
        return torch.cat([input_ids, made], 1)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        """``logits`` of what comes after each prompt: rows x 1 x vocabulary."""
        rows = []
        for prompt in _unpadded(input_ids, attention_mask):
            for piece in torch.tensor(prompt).split(_PIECE):
                last = self._engine.put([0], [piece])
            self._engine.flush(0)
            rows.append(last[:, : self.config.vocab_size].cpu())
        return SimpleNamespace(logits=torch.stack(rows))


def load(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> Ragged:
    """The causal language model in ``folder``, over ``tensor`` GPUs of one machine; on every rank at the same time.

    Raises HandlerLoadError, with the cure, for what MII cannot: CPUs, a pipeline of layers, several machines, weights
    that are pickles (it runs them), other numbers than float16 and bfloat16, architectures that it does not know.
    """
    if pipeline > 1:
        raise HandlerLoadError(
            "model-config.yaml: engine: mii cuts each layer up: give tensor_parallel and no pipeline_parallel. A "
            "pipeline has engine: {name: transformers}."
        )
    if gpu_id is None or not torch.cuda.is_available():
        raise HandlerLoadError(
            "model-config.yaml: engine: mii (DeepSpeed-MII) has kernels for NVIDIA GPUs alone, and this process has "
            "none. Give num_gpus: 1 where there are some; else take engine: {name: deepspeed} with tensor_parallel, "
            "or the handler llm, which batches as continuously."
        )
    if importlib.util.find_spec("mii") is None:
        raise HandlerLoadError(
            "model-config.yaml: engine: mii is not installed: pip install 'torchrelay[mii]' where the model runs."
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", tensor)) != tensor:
        raise HandlerLoadError(
            "model-config.yaml: the ranks of engine: mii talk within one machine, and these lie on several. Take "
            "placement_strategy: STRICT_PACK, or engine: {name: transformers}."
        )
    if (folder / "ds_model_config.pkl").exists() or not any(folder.glob("*.safetensors")):
        raise HandlerLoadError(
            f"{folder}: engine: mii would run what is pickled in it. Save the model's weights as safetensors."
        )
    sharding.check(folder, tensor, pipeline)
    return _load(folder, tensor)


def _load(folder: Path, tensor: int) -> Ragged:
    from mii.config import ModelConfig
    from mii.modeling.models import load_model
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    requests, group = _ports()
    settings = ModelConfig(
        model_name_or_path=str(folder), tensor_parallel=tensor, zmq_port_number=requests, torch_dist_port=group
    )
    try:
        engine = load_model(settings)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise HandlerLoadError(
            f"{folder}: DeepSpeed-MII cannot serve this model ({error}). It has Llama, Mistral, Mixtral, Qwen 2, Phi, "
            "OPT and Falcon, in float16 or bfloat16 as their config.json says; others have engine: {name: "
            "transformers}."
        ) from error
    return Ragged(engine, config, generation, settings)


def _ports() -> list[int]:
    """Two that are free at rank 0, known to all ranks: MII's own are the same for every model of a machine."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
    if dist.is_initialized():
        dist.broadcast_object_list(ports)
    return ports


def _unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]
