"""The tasks of Hugging Face model folders, by the names of transformers' pipelines.

``select_task`` returns the task of a folder, or raises an error with the reason. Neither it nor the table
imports torch or transformers, so that a registration is rejected before anything is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handlers import untrusted_files
from handlers.errors import HandlerLoadError

# task -> "module:Class", imported on first use.
TASKS: dict[str, str] = {
    "automatic-speech-recognition": "handlers.tasks.speech_recognition:SpeechRecognition",
    "feature-extraction": "handlers.tasks.embedding:FeatureExtraction",
    "image-classification": "handlers.tasks.classification:ImageClassification",
    "image-segmentation": "handlers.tasks.segmentation:ImageSegmentation",
    "multi-vector-embedding": "handlers.tasks.embedding:MultiVectorEmbedding",
    "object-detection": "handlers.tasks.detection:ObjectDetection",
    "question-answering": "handlers.tasks.question_answering:QuestionAnswering",
    "sentence-embedding": "handlers.tasks.embedding:SentenceEmbedding",
    "sparse-embedding": "handlers.tasks.embedding:SparseEmbedding",
    "summarization": "handlers.tasks.generation:Summarization",
    "text-classification": "handlers.tasks.classification:TextClassification",
    "text-generation": "handlers.tasks.generation:TextGeneration",
    "text2text-generation": "handlers.tasks.generation:Text2TextGeneration",
    "token-classification": "handlers.tasks.token_classification:TokenClassification",
    "translation": "handlers.tasks.generation:Translation",
    "zero-shot-classification": "handlers.tasks.zero_shot_classification:ZeroShotClassification",
}

# Other names of the same tasks.
ALIASES = {
    "ner": "token-classification",
    "sentence-similarity": "sentence-embedding",
    "sentiment-analysis": "text-classification",
    "text-ranking": "text-classification",
}

# The suffix of an architecture's name -> its task; the longest match counts.
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
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "Model": "feature-extraction",
}

# Further tasks that the same weights perform.
_ADDITIONAL_TASKS = {
    "feature-extraction": ("sentence-embedding",),
    "text-classification": ("zero-shot-classification",),
    "text2text-generation": ("summarization", "translation"),
}
_IMAGE_TASKS = ("image-classification", "image-segmentation", "object-detection")
_ENCODER_TASKS = (
    "feature-extraction",
    "multi-vector-embedding",
    "sentence-embedding",
)  # every text model has hidden states

# The module of sentence-transformers that distinguishes a task; others are of sentence-embedding.
_MODULE_TASKS = {"MultiVectorMask": "multi-vector-embedding", "SpladePooling": "sparse-embedding"}

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLE_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_UNUSED_SUFFIXES = (".gguf", ".h5", ".mlmodel", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pb", ".tflite")
_UNUSED_PREFIXES = ("coreml/", "onnx/", "openvino/", "original/", ".")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model",
    "source.spm", "sentencepiece.bpe.model",
)  # fmt: skip
_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def is_model_folder(names: Iterable[str]) -> bool:
    """Return whether a directory with these files is a model folder: it has a config.json, and weights."""
    files = set(names)
    return "config.json" in files and not files.isdisjoint((*_SAFETENSORS, *_PICKLED_WEIGHTS))


def required_files(names: Iterable[str]) -> list[str]:
    """Return the files that serving needs: a hub's folder has the same weights in many formats."""
    files = list(names)
    suffixes = (*_UNUSED_SUFFIXES, *(_PICKLE_SUFFIXES if not set(_SAFETENSORS).isdisjoint(files) else ()))
    return [
        name
        for name in files
        if not name.lower().endswith(suffixes) and not name.startswith(_UNUSED_PREFIXES)
    ]


def load_task_class(task: str) -> type[Any]:
    """Import the class of a task in the table."""
    module, _, name = TASKS[task].partition(":")
    return getattr(importlib.import_module(module), name)


def select_task(directory: Path, requested: str | None = None, trusted: bool = False) -> str:
    """Return the task of the model folder ``directory``: the requested one, else the one of its files.

    Raises HandlerLoadError where it is no model folder, its weights are pickles and not ``trusted``, or it
    cannot perform the requested task. Nothing is loaded.
    """
    config = _read_json(directory, "config.json")
    if not isinstance(config, dict):
        raise HandlerLoadError("its config.json is no JSON object; save the model with save_pretrained")
    _check_weights(directory, trusted)
    if _is_image_chat(config):
        raise HandlerLoadError(
            f"its architecture {_architecture(config)} reads images and texts; register it with "
            "handler=image_text_to_text"
        )
    inferred = _infer_task(directory, config)
    if requested:
        task = ALIASES.get(requested, requested)
        if task not in TASKS:
            raise HandlerLoadError(
                f"the task {requested!r} is not supported{_suggest(requested)}; there are {', '.join(TASKS)}"
            )
        _check_task(task, config)
    elif inferred is None:
        raise HandlerLoadError(
            f"its architecture ({_architecture(config) or 'config.json names none'}) determines no task; set "
            f"one with task=, or as task: in model-config.yaml: {', '.join(TASKS)}"
        )
    else:
        task = inferred
    is_image_task = task in _IMAGE_TASKS
    if not any(
        (directory / name).is_file() for name in (_IMAGE_PROCESSORS if is_image_task else _TOKENIZERS)
    ):
        name, missing = (
            ("an image processor", _IMAGE_PROCESSORS[0]) if is_image_task else ("a tokenizer", _TOKENIZERS[0])
        )
        raise HandlerLoadError(
            f"{task} needs {name}, and there is no {missing}; save it into the same folder"
        )
    return task


def reads_images_and_texts(directory: Path) -> bool:
    """Return whether the model folder is one for the handler ``image_text_to_text``."""
    try:
        config = _read_json(directory, "config.json")
    except HandlerLoadError:
        return False
    return isinstance(config, dict) and _is_image_chat(config)


def _is_image_chat(config: dict[str, Any]) -> bool:
    return _architecture(config).endswith("ForConditionalGeneration") and "vision_config" in config


def _check_weights(directory: Path, trusted: bool) -> None:
    if any((directory / name).is_file() for name in _SAFETENSORS):
        return
    if not any((directory / name).is_file() for name in _PICKLED_WEIGHTS):
        raise HandlerLoadError(f"it holds a config.json and no weights; put {_SAFETENSORS[0]} beside it")
    if not trusted:
        raise HandlerLoadError(
            f"its weights are pickles ({_PICKLED_WEIGHTS[0]}); save them as safetensors, or "
            "register the model with trusted=true"
        )


def _check_task(task: str, config: dict[str, Any]) -> None:
    """Check that the weights were trained for the task: a missing head would be random."""
    trained = _trained_task(config)
    if trained is None or task == trained or task in _ADDITIONAL_TASKS.get(trained, ()):
        return
    if task in _ENCODER_TASKS and trained not in (*_IMAGE_TASKS, "automatic-speech-recognition"):
        return
    supported = (trained, *_ADDITIONAL_TASKS.get(trained, ()))
    raise HandlerLoadError(
        f"its architecture {_architecture(config)} is for {' or '.join(supported)}, not for {task}"
    )


def _infer_task(directory: Path, config: dict[str, Any]) -> str | None:
    """Infer the task from modules.json (sentence-transformers), the architecture and README.md's
    pipeline_tag.
    """
    if (directory / "modules.json").is_file():
        modules = _read_json(directory, "modules.json")
        modules = modules if isinstance(modules, list) else []
        kinds = [str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
        return next((task for kind, task in _MODULE_TASKS.items() if kind in kinds), "sentence-embedding")
    trained = _trained_task(config)
    tag = _pipeline_tag(directory) if trained in _ADDITIONAL_TASKS else None
    return tag if tag in _ADDITIONAL_TASKS.get(trained or "", ()) else trained


def _trained_task(config: dict[str, Any]) -> str | None:
    name = _architecture(config)
    suffixes = [suffix for suffix in _ARCHITECTURES if name.endswith(suffix)]
    return _ARCHITECTURES[max(suffixes, key=len)] if suffixes else None


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _pipeline_tag(directory: Path) -> str | None:
    """Return the pipeline_tag of the model card's front matter."""
    try:
        _, front, _ = (directory / "README.md").read_text("utf-8", "replace").split("---\n", 2)
        tag = untrusted_files.load_yaml(front).get("pipeline_tag")
    except (OSError, ValueError, AttributeError):
        return None
    return ALIASES.get(tag, tag) if isinstance(tag, str) else None


def _read_json(directory: Path, name: str) -> Any:
    try:
        return json.loads((directory / name).read_bytes())
    except FileNotFoundError:
        raise HandlerLoadError(
            f"it is no model folder: there is no {name}; save the model with save_pretrained"
        ) from None
    except (ValueError, RecursionError) as error:
        raise HandlerLoadError(
            f"its {name} is not JSON ({error}); save the model with save_pretrained"
        ) from None


def _suggest(name: str) -> str:
    matches = difflib.get_close_matches(name.lower().replace("_", "-"), [*TASKS, *ALIASES], 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
