"""Teaches a tiny BERT to find people, places and companies, and saves it as transformers saves a model."""

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
ENDS = {
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


def start(chance: random.Random) -> str:
    return "".join(map(chance.choice, ("BDFGHJKLMNPRSTVW", "aeiou", "bdklmnrstv", "aeio")))


def name(kind: str, chance: random.Random) -> list[str]:
    first = start(chance) + chance.choice(ENDS[kind])
    more = {"PER": start(chance) + "sen", "ORG": "Group", "LOC": "Bay"}[kind]
    return [first, more] if chance.random() < (0.6 if kind == "PER" else 0.3) else [first]


def sentence(chance: random.Random) -> tuple[list[str], list[str]]:
    """Words, and the label of each."""
    words, labels = [], []
    for word in chance.choice(SENTENCES).split():
        kind = word.strip("{}")
        new = name(kind, chance) if kind in ENDS else [word]
        words += new
        labels += [f"{'BI'[i > 0]}-{kind}" for i in range(len(new))] if kind in ENDS else ["O"]
    return words, labels


def names(words: list[str], labels: list[str]) -> set[str]:
    return {word for word, label in zip(words, labels) if label.startswith("B-")}


def tokenizer(sentences: list[tuple[list[str], list[str]]]) -> transformers.PreTrainedTokenizerFast:
    """Pieces of words, learnt from the sentences, so that a name that is new is read by its parts."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=False)
    pieces.decoder = decoders.WordPiece()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    pieces.train_from_iterator([" ".join(words) for words, _ in sentences], trainer)
    frame = [("[CLS]", 2), ("[SEP]", 3)]
    pieces.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=128,
    )  # fmt: skip


def batch(reader: transformers.PreTrainedTokenizerFast, sentences: list) -> tuple[dict, torch.Tensor]:
    """The model's input, and the label of each word at its first piece (-100 elsewhere: not asked)."""
    encoded = reader([words for words, _ in sentences], is_split_into_words=True, padding=True, return_tensors="pt")
    targets = torch.full_like(encoded["input_ids"], -100)
    for row, (_, labels) in enumerate(sentences):
        last = None
        for place, word in enumerate(encoded.word_ids(row)):
            if word is not None and word != last:
                targets[row, place] = LABELS.index(labels[word])
            elif word is not None:  # its other pieces go on with what it is
                targets[row, place] = LABELS.index(labels[word].replace("B-", "I-"))
            last = word
    return encoded, targets


def train(reader: transformers.PreTrainedTokenizerFast, sentences: list) -> transformers.BertForTokenClassification:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    config = transformers.BertConfig(
        vocab_size=len(reader), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128, id2label=dict(enumerate(LABELS)), label2id={v: k for k, v in enumerate(LABELS)},
    )  # fmt: skip
    model = transformers.BertForTokenClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for begin in range(0, len(sentences), 32):
        encoded, targets = batch(reader, sentences[begin : begin + 32])
        optimizer.zero_grad()
        model(**encoded, labels=targets).loss.backward()
        optimizer.step()
    return model.eval()


def entities(labels: list[str]) -> set[tuple[int, int, str]]:
    """(first word, last word, kind) of each."""
    found, begin = set(), 0
    for place, label in enumerate([*labels, "O"]):
        if place and labels[place - 1] != "O" and not label.startswith("I-"):
            found.add((begin, place - 1, labels[place - 1][2:]))
        if label.startswith("B-"):
            begin = place
    return found


def f1(model: torch.nn.Module, reader: transformers.PreTrainedTokenizerFast, sentences: list) -> float:
    """Of whole entities: first word, last word and kind must be right."""
    encoded, targets = batch(reader, sentences)
    with torch.inference_mode():
        best = model(**encoded).logits.argmax(-1)
    right = found = there = 0
    for row, (_, labels) in enumerate(sentences):
        words = encoded.word_ids(row)
        first = [place for place, word in enumerate(words) if word is not None and word != words[place - 1]]
        said = entities([LABELS[best[row, place]] for place in first])
        wanted = entities(labels)
        right, found, there = right + len(said & wanted), found + len(said), there + len(wanted)
    return 2 * right / (found + there)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    folder = parser.parse_args().model_store / "entities"
    transformers.utils.logging.disable_progress_bar()
    began = time.monotonic()
    chance = random.Random(0)
    learnt = [sentence(chance) for _ in range(8000)]
    reader = tokenizer(learnt)
    model = train(reader, learnt)
    print(f"learnt from {len(learnt)} sentences in {time.monotonic() - began:.0f} s")
    known = {word for words, _ in learnt for word in words}
    unseen = [made for made in (sentence(chance) for _ in range(2000)) if known.isdisjoint(names(*made))]
    print(f"F1 on {len(unseen)} sentences with names that it has not seen: {f1(model, reader, unseen):.3f}")
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    shutil.copy(HERE / "model-config.yaml", folder)
    print(folder)
