"""What a Hugging Face model folder can be asked: one table of tasks, by the names of transformers' pipelines.

``choose`` says which of them a folder is for, or why it is for none. Neither it nor the table imports
torch or transformers, so that a registration is refused before anything is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from handlers.errors import HandlerLoadError

# task -> "module:Class", imported when asked for.
TASKS: dict[str, str] = {
    "feature-extraction": "handlers.tasks.embedding:FeatureExtraction",
    "image-classification": "handlers.tasks.classification:ImageClassification",
    "image-segmentation": "handlers.tasks.segmentation:ImageSegmentation",
    "object-detection": "handlers.tasks.detection:ObjectDetection",
    "question-answering": "handlers.tasks.question_answering:QuestionAnswering",
    "sentence-embedding": "handlers.tasks.embedding:SentenceEmbedding",
    "summarization": "handlers.tasks.generation:Summarization",
    "text-classification": "handlers.tasks.classification:TextClassification",
    "text-generation": "handlers.tasks.generation:TextGeneration",
    "text2text-generation": "handlers.tasks.generation:Text2TextGeneration",
    "token-classification": "handlers.tasks.token_classification:TokenClassification",
    "translation": "handlers.tasks.generation:Translation",
    "zero-shot-classification": "handlers.tasks.zero_shot_classification:ZeroShotClassification",
}

# What the same task is called elsewhere.
_ALSO = {
    "ner": "token-classification",
    "sentence-similarity": "sentence-embedding",
    "sentiment-analysis": "text-classification",
}

# The end of an architecture's name -> its task; the longest that fits counts.
_ARCHITECTURES = {
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForImageClassification": "image-classification",
    "ForInstanceSegmentation": "image-segmentation",
    "ForObjectDetection": "object-detection",
    "ForQuestionAnswering": "question-answering",
    "ForSegmentation": "image-segmentation",
    "ForSemanticSegmentation": "image-segmentation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForUniversalSegmentation": "image-segmentation",
    "LMHeadModel": "text-generation",
    "MTModel": "text2text-generation",
    "Model": "feature-extraction",
}

# What the same weights answer as well.
_ALSO_ANSWERS = {
    "feature-extraction": ("sentence-embedding",),
    "text-classification": ("zero-shot-classification",),
    "text2text-generation": ("summarization", "translation"),
}
_OF_IMAGES = ("image-classification", "image-segmentation", "object-detection")
_OF_ENCODERS = ("feature-extraction", "sentence-embedding")  # any model of texts has hidden states

_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_OTHERS = (".gguf", ".h5", ".mlmodel", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pb", ".tflite")
_OF_OTHERS = ("coreml/", "onnx/", "openvino/", "original/", ".")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model",
    "source.spm", "sentencepiece.bpe.model",
)  # fmt: skip
_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def is_folder(names: Iterable[str]) -> bool:
    """Whether a directory in which these files lie is a model folder: a config.json, and weights."""
    found = set(names)
    return "config.json" in found and not found.isdisjoint((*_SAFE, *_PICKLED))


def needed(names: Iterable[str]) -> list[str]:
    """Of a model folder's files those that serve it: a hub's folder holds the same weights in many formats."""
    found = list(names)
    others = (*_OTHERS, *(_PICKLES if not set(_SAFE).isdisjoint(found) else ()))
    return [name for name in found if not name.lower().endswith(others) and not name.startswith(_OF_OTHERS)]


def task_class(task: str) -> type[Any]:
    """The class of a task in the table."""
    module, _, name = TASKS[task].partition(":")
    return getattr(importlib.import_module(module), name)


def choose(directory: Path, asked: str | None = None, trusted: bool = False) -> str:
    """The task of the model folder ``directory``: the one that is asked for, else the one its files are for.

    Raises HandlerLoadError where it is no model folder, its weights are pickles and not ``trusted``, or it
    does not do what is asked. Nothing is loaded.
    """
    config = _json(directory, "config.json")
    if not isinstance(config, dict):
        raise HandlerLoadError("its config.json is no JSON object; save the model with save_pretrained")
    _check_weights(directory, trusted)
    own = _inferred(directory, config)
    if asked:
        task = _ALSO.get(asked, asked)
        if task not in TASKS:
            raise HandlerLoadError(f"the task {asked!r} is not supported{_near(asked)}; there are {', '.join(TASKS)}")
        _check_task(task, config)
    elif own is None:
        raise HandlerLoadError(
            f"its architecture ({_architecture(config) or 'config.json names none'}) tells no task; say one with "
            f"task=, or as task: in model-config.yaml: {', '.join(TASKS)}"
        )
    else:
        task = own
    images = task in _OF_IMAGES
    if not any((directory / name).is_file() for name in (_IMAGE_PROCESSORS if images else _TOKENIZERS)):
        what, missing = ("an image processor", _IMAGE_PROCESSORS[0]) if images else ("a tokenizer", _TOKENIZERS[0])
        raise HandlerLoadError(f"{task} needs {what}, and there is no {missing}; save it into the same folder")
    return task


def _check_weights(directory: Path, trusted: bool) -> None:
    if any((directory / name).is_file() for name in _SAFE):
        return
    if not any((directory / name).is_file() for name in _PICKLED):
        raise HandlerLoadError(f"it holds a config.json and no weights; put {_SAFE[0]} beside it")
    if not trusted:
        raise HandlerLoadError(
            f"its weights are pickles ({_PICKLED[0]}); save them as safetensors, or write trusted: true into its "
            "model-config.yaml"
        )


def _check_task(task: str, config: dict[str, Any]) -> None:
    """The weights were trained for this; a head that they do not hold would answer at random."""
    trained = _trained_for(config)
    if trained is None or task == trained or task in _ALSO_ANSWERS.get(trained, ()):
        return
    if task in _OF_ENCODERS and trained not in _OF_IMAGES:
        return
    able = (trained, *_ALSO_ANSWERS.get(trained, ()))
    raise HandlerLoadError(f"its architecture {_architecture(config)} is for {' or '.join(able)}, not for {task}")


def _inferred(directory: Path, config: dict[str, Any]) -> str | None:
    """modules.json is sentence-transformers'; README.md's pipeline_tag tells an architecture's tasks apart."""
    if (directory / "modules.json").is_file():
        return "sentence-embedding"
    trained = _trained_for(config)
    tag = _pipeline_tag(directory) if trained in _ALSO_ANSWERS else None
    return tag if tag in _ALSO_ANSWERS.get(trained or "", ()) else trained


def _trained_for(config: dict[str, Any]) -> str | None:
    name = _architecture(config)
    ends = [end for end in _ARCHITECTURES if name.endswith(end)]
    return _ARCHITECTURES[max(ends, key=len)] if ends else None


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _pipeline_tag(directory: Path) -> str | None:
    """Of a model card's front matter."""
    try:
        _, front, _ = (directory / "README.md").read_text("utf-8", "replace").split("---\n", 2)
        tag = yaml.safe_load(front).get("pipeline_tag")
    except (OSError, ValueError, AttributeError, yaml.YAMLError, RecursionError):
        return None
    return _ALSO.get(tag, tag) if isinstance(tag, str) else None


def _json(directory: Path, name: str) -> Any:
    try:
        return json.loads((directory / name).read_bytes())
    except FileNotFoundError:
        raise HandlerLoadError(
            f"it is no model folder: there is no {name}; save the model with save_pretrained"
        ) from None
    except (ValueError, RecursionError) as error:
        raise HandlerLoadError(f"its {name} is not JSON ({error}); save the model with save_pretrained") from None


def _near(asked: str) -> str:
    match = difflib.get_close_matches(asked.lower().replace("_", "-"), [*TASKS, *_ALSO], 1)
    return f"; did you mean {match[0]!r}?" if match else ""
