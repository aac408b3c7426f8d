"""Overfit a tiny Llama on six nursery rhymes, in seconds, and archive it for the handler ``llm``."""

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
RHYMES = (HERE / "rhymes.txt").read_text().strip().split("\n\n")
END = "<end>"
# The template passes only the last message of a chat: the model knows rhymes, not conversations.
TEMPLATE = "{{ messages[-1].content }}"


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # every byte, so that any text can be tokenized
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokens.train_from_iterator(RHYMES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train(tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(1)
    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    batch = tokenizer(
        [rhyme + END for rhyme in RHYMES], return_tensors="pt", padding=True, padding_side="right"
    )
    # The loss ignores positions behind a rhyme's first <end>, which is also the padding token.
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    labels = batch["input_ids"].masked_fill(torch.arange(batch["input_ids"].shape[1]) >= lengths, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after {steps} steps: {loss.item():.4f}")
    return model.eval()


def archive(folder: Path, store: Path) -> Path:
    manifest = {
        "modelName": "rhymes",
        "modelVersion": "1.0",
        "handler": "llm",
        "serializedFile": "model.safetensors",
        "configFile": "model-config.yaml",
    }
    partial = store / ".rhymes.partial"
    with zipfile.ZipFile(partial, "w") as file:
        for part in [*sorted(folder.iterdir()), HERE / "model-config.yaml"]:
            file.write(part, part.name)
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2))
    return partial.replace(store / "rhymes.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    options.model_store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(temporary)
        train(tokenizer, options.steps).save_pretrained(temporary)
        print(f"archived as {archive(Path(temporary), options.model_store)}")
