"""The models of the checks, of random weights: a BERT in archives, and a Llama as a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor

from tests.gpu.archive.bert import Bert
from tests.support.archives import make_archive

_SOURCES = Path(__file__).parent / "archive"
VOCABULARY = 1000


@dataclass(frozen=True)
class Scale:
    """The device of a run, the sizes of its models, and how much is measured."""

    device: str
    bert: dict[str, int]
    tokens: int  # of a request
    batch_size: int
    connections: tuple[int, ...]
    seconds: float  # of each measurement
    llama: dict[str, int]
    dtype: str  # of the Llama
    streams: tuple[int, ...]
    new_tokens: int  # of a generated text

    @property
    def ids(self) -> list[int]:
        """The token ids of a request."""
        return [position * 37 % (VOCABULARY - 1) + 1 for position in range(self.tokens)]


SCALES = {
    "cuda": Scale(
        device="cuda",
        bert={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        },
        tokens=128,
        batch_size=32,
        connections=(1, 32, 128),
        seconds=2.0,
        llama={
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
        },
        dtype="bfloat16",
        streams=(1, 8, 32),
        new_tokens=64,
    ),
    "cpu": Scale(
        device="cpu",
        bert={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
        tokens=16,
        batch_size=2,
        connections=(1, 2),
        seconds=0.5,
        llama={"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 8},
        dtype="float32",
        streams=(1, 2),
        new_tokens=8,
    ),
}


def bert_sizes(scale: Scale, seed: int = 0) -> dict[str, int]:
    return {**scale.bert, "vocab_size": VOCABULARY, "seed": seed}


def build_bert(scale: Scale, seed: int = 0, dtype: str = "float32") -> Bert:
    return Bert(bert_sizes(scale, seed)).eval().to(getattr(torch, dtype))


def archive_bert(
    folder: Path,
    scale: Scale,
    name: str,
    version: str = "1.0",
    *,
    seed: int = 0,
    handler: str = "handler.py",
    graph: Path | None = None,
    **config: Any,
) -> Path:
    """Write an archive of BERT, which needs a GPU or the share ``num_gpus`` of one.

    Its weights are made as it is loaded; ``graph`` is a compiled model in place of the class.
    """
    files: dict[str, str | bytes] = {"sample.json": json.dumps(scale.ids)}
    if graph is None:
        files |= {
            "bert.py": (_SOURCES / "bert.py").read_text(),
            "bert.json": json.dumps(bert_sizes(scale, seed)),
        }
        model = {"modelFile": "bert.py"}
    else:
        files[graph.name] = graph.read_bytes()
        model = {"serializedFile": graph.name}
    config = {"num_gpus": 1, "samples": ["sample.json"], "startupTimeout": 300, **config}
    return make_archive(folder, name, (_SOURCES / handler).read_text(), version, files, config, model)


def compile_bert(scale: Scale, file: Path, dtype: str) -> None:
    """Compile BERT by AOTInductor, for batches of any size."""
    model, ids = build_bert(scale, dtype=dtype).to(scale.device), torch.tensor([scale.ids] * 2)
    with torch.no_grad():
        batch = {0: torch.export.Dim.AUTO}
        program = torch.export.export(model, (ids.to(scale.device),), dynamic_shapes=(batch,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))


def save_llama(folder: Path, scale: Scale, **config: Any) -> None:
    """Save a Llama that never ends a text by itself, with a tokenizer of a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"num_key_value_heads": scale.llama["num_attention_heads"] // 4, "max_position_embeddings": 512}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device(scale.device):  # a billion random numbers take long on a CPU
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **scale.llama, **sizes, **ends))
    model.to(getattr(torch, scale.dtype)).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    (folder / "model-config.yaml").write_text(json.dumps({"num_gpus": 1, "startupTimeout": 300, **config}))
