"""Helpers for tests of LoRA adapters: adapters that peft writes, and peft's own outputs as the reference."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Ignore the warnings of peft, which uses deprecated names of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_adapter(base: Path, folder: Path, seed: int = 0, strength: float = 0.3, **config: Any) -> Path:
    """Save an adapter of random weights for the model in ``base``; both of its matrices differ from zero."""
    import peft
    import transformers

    with torch.random.fork_rng(), _ignore_warnings():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=strength)
        adapted.save_pretrained(folder)
    return folder


def load_model(base: Path, adapter: Path | None) -> Any:
    """Return transformers' model of a folder, with peft's adapter."""
    import peft
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        with _ignore_warnings():
            model = peft.PeftModel.from_pretrained(model, adapter)
    return model


def generate(base: Path, adapter: Path | None, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the greedy tokens of transformers' ``generate`` with peft's adapter."""
    model = load_model(base, adapter)
    ids = torch.tensor([prompt])
    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        **options,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens
