"""Train a tiny BERT to find people, places and companies, and save it as a transformers folder."""

import argparse
import random
import shutil
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
SUFFIXES = {
    "PER": ("na", "ric", "ta", "mir", "la"),
    "LOC": ("ville", "burg", "ton", "stad"),
    "ORG": ("tec", "soft", "corp"),
}
SENTENCES = (
    "{PER} lives in {LOC} .",
    "{PER} works for {ORG} in {LOC} .",
    "{ORG} opens an office in {LOC} next year .",
    "Last week {PER} met {PER} of {ORG} .",
    "The weather in {LOC} was fine , said {PER} .",
    "{ORG} buys {ORG} .",
    "Nobody was there on Monday .",
    "{PER} and {PER} left {LOC} by train .",
    "Shares of {ORG} fell , and {PER} resigned .",
)


def random_stem(rng: random.Random) -> str:
    return "".join(map(rng.choice, ("BDFGHJKLMNPRSTVW", "aeiou", "bdklmnrstv", "aeio")))


def random_name(kind: str, rng: random.Random) -> list[str]:
    first = random_stem(rng) + rng.choice(SUFFIXES[kind])
    more = {"PER": random_stem(rng) + "sen", "ORG": "Group", "LOC": "Bay"}[kind]
    return [first, more] if rng.random() < (0.6 if kind == "PER" else 0.3) else [first]


def random_sentence(rng: random.Random) -> tuple[list[str], list[str]]:
    """Return words, and the label of each."""
    words, labels = [], []
    for word in rng.choice(SENTENCES).split():
        kind = word.strip("{}")
        name = random_name(kind, rng) if kind in SUFFIXES else [word]
        words += name
        labels += [f"{'BI'[i > 0]}-{kind}" for i in range(len(name))] if kind in SUFFIXES else ["O"]
    return words, labels


def first_names(words: list[str], labels: list[str]) -> set[str]:
    return {word for word, label in zip(words, labels) if label.startswith("B-")}


def train_tokenizer(sentences: list[tuple[list[str], list[str]]]) -> transformers.PreTrainedTokenizerFast:
    """Train a word-piece tokenizer on the sentences, which splits new names into known pieces."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=False)
    pieces.decoder = decoders.WordPiece()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    pieces.train_from_iterator([" ".join(words) for words, _ in sentences], trainer)
    special_tokens = [("[CLS]", 2), ("[SEP]", 3)]
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special_tokens
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=128,
    )  # fmt: skip


def encode_batch(
    tokenizer: transformers.PreTrainedTokenizerFast, sentences: list
) -> tuple[dict, torch.Tensor]:
    """Return the model's input and a label per piece (-100, which the loss ignores, for special tokens)."""
    encoded = tokenizer(
        [words for words, _ in sentences], is_split_into_words=True, padding=True, return_tensors="pt"
    )
    targets = torch.full_like(encoded["input_ids"], -100)
    for row, (_, labels) in enumerate(sentences):
        last = None
        for position, word in enumerate(encoded.word_ids(row)):
            if word is not None and word != last:
                targets[row, position] = LABELS.index(labels[word])
            elif word is not None:  # further pieces continue the entity
                targets[row, position] = LABELS.index(labels[word].replace("B-", "I-"))
            last = word
    return encoded, targets


def train(
    tokenizer: transformers.PreTrainedTokenizerFast, sentences: list
) -> transformers.BertForTokenClassification:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up so small a model
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = transformers.BertForTokenClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for start in range(0, len(sentences), 32):
        encoded, targets = encode_batch(tokenizer, sentences[start : start + 32])
        optimizer.zero_grad()
        model(**encoded, labels=targets).loss.backward()
        optimizer.step()
    return model.eval()


def find_entities(labels: list[str]) -> set[tuple[int, int, str]]:
    """Return the (first word, last word, kind) of each entity."""
    entities, start = set(), 0
    for index, label in enumerate([*labels, "O"]):
        if index and labels[index - 1] != "O" and not label.startswith("I-"):
            entities.add((start, index - 1, labels[index - 1][2:]))
        if label.startswith("B-"):
            start = index
    return entities


def f1_score(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, sentences: list
) -> float:
    """Return the F1 score of entities whose first word, last word and kind are correct."""
    encoded, _ = encode_batch(tokenizer, sentences)
    with torch.inference_mode():
        predictions = model(**encoded).logits.argmax(-1)
    correct = predicted_count = actual_count = 0
    for row, (_, labels) in enumerate(sentences):
        words = encoded.word_ids(row)
        first = [i for i, word in enumerate(words) if word is not None and word != words[i - 1]]
        predicted = find_entities([LABELS[predictions[row, i]] for i in first])
        actual = find_entities(labels)
        correct += len(predicted & actual)
        predicted_count += len(predicted)
        actual_count += len(actual)
    return 2 * correct / (predicted_count + actual_count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    folder = parser.parse_args().model_store / "entities"
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()
    rng = random.Random(0)
    sentences = [random_sentence(rng) for _ in range(8000)]
    tokenizer = train_tokenizer(sentences)
    model = train(tokenizer, sentences)
    print(f"learnt from {len(sentences)} sentences in {time.monotonic() - started:.0f} s")
    known = {word for words, _ in sentences for word in words}
    unseen = [
        candidate
        for candidate in (random_sentence(rng) for _ in range(2000))
        if known.isdisjoint(first_names(*candidate))
    ]
    score = f1_score(model, tokenizer, unseen)
    print(f"F1 on {len(unseen)} sentences with names that it has not seen: {score:.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(HERE / "model-config.yaml", folder)
    print(folder)
