"""Overfit a very small Llama on one rhyme and archive it as rhyme.mar."""

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
RHYME = "Twinkle, twinkle, little star, how I wonder what you are. "


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes."""
    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def train(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # tensor_parallel divides this and the heads
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    text = tokenizer(RHYME * 3, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.3f}")
    return model.eval()


def archive(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Path) -> Path:
    manifest = {
        "modelName": "rhyme",
        "modelVersion": "1.0",
        "handler": "handler.py",
        "configFile": "model-config.yaml",
    }
    store.mkdir(parents=True, exist_ok=True)
    partial = store / ".rhyme.partial"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(partial, "w") as archive:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in (HERE / "handler.py", HERE / "model-config.yaml", *Path(folder).iterdir()):
            archive.write(file, file.name)
        archive.writestr(
            "MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2)
        )
    return partial.replace(store / "rhyme.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    tokenizer = byte_tokenizer()
    print(f"archived as {archive(train(tokenizer), tokenizer, parser.parse_args().model_store)}")
