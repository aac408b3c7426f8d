"""Files of LoRA adapters: ``adapter_config.json`` and ``adapter_model.safetensors``, as peft writes them."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers import extras
from handlers.errors import HandlerLoadError, PredictionException

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_OPTIONS = ("max_adapters", "max_adapter_rank", "base_model")
_MAX_CONFIG_SIZE = 1 << 20
_PREFIX = "base_model.model."
# Fields that may differ from peft's defaults: they are applied here, or matter in training only.
_SUPPORTED_FIELDS = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version", "auto_mapping"),
    *(
        "inference_mode",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
    ),
}
# Other ways to initialize change the base model's weights too.
_SUPPORTED_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The options of a model's adapters; ``base_model`` is the name on the Hub that they must be made for."""

    max_adapters: int = 16
    max_adapter_rank: int = 64
    base_model: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any], folder: Path) -> AdapterOptions:
        """Return the options in the ``engine`` mapping. Raises HandlerLoadError for an invalid one.

        The default of ``base_model`` is the name in the model's own ``config.json``, if it has one.
        """
        numbers = {key: options[key] for key in ("max_adapters", "max_adapter_rank") if key in options}
        for key, value in numbers.items():
            if type(value) is not int or value < 1:
                raise HandlerLoadError(
                    f"model-config.yaml: engine.{key} is {value!r}; it is a whole number from 1."
                )
        base_model = options.get("base_model")
        if base_model is not None and not isinstance(base_model, str):
            raise HandlerLoadError(f"model-config.yaml: engine.base_model is {base_model!r}; it is a name.")
        return cls(**numbers, base_model=base_model or _read_name(folder))

    def check_count(self, names: Iterable[str]) -> None:
        """Raise HandlerLoadError where the model has as many adapters as it may have."""
        if (count := len(list(names))) >= self.max_adapters:
            raise HandlerLoadError(
                f"the model has {count} adapters, and engine.max_adapters is {self.max_adapters}: remove "
                "one, or raise the limit in model-config.yaml"
            )

    def check_base(self, name: str | None) -> None:
        """Raise HandlerLoadError for an adapter whose configuration names another model on the Hub."""
        if _is_hub_name(name) and _is_hub_name(self.base_model) and name != self.base_model:
            raise HandlerLoadError(
                f"{CONFIG_FILE}: base_model_name_or_path is {name}, and this model is {self.base_model}. If "
                f"the adapter fits nevertheless, set engine: {{base_model: {name}}} in model-config.yaml"
            )


def read_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], options: AdapterOptions
) -> tuple[int, dict[str, tuple[torch.Tensor, torch.Tensor, float]]]:
    """Return an adapter's highest rank, and the matrices A and B and the scaling of each adapted module.

    ``modules`` holds the model's layers: their paths, and the widths of input and output. Raises
    HandlerLoadError for what is not supported and for an adapter of another model.
    """
    config = read_config(folder)
    options.check_base(config.base_model_name_or_path)
    weights: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    highest = 0
    for path, (down, up) in _pair_matrices(_read_weights(folder), modules).items():
        rank = _check_shapes(path, down, up, modules[path])
        if rank > options.max_adapter_rank:
            raise HandlerLoadError(
                f"{path} has the rank {rank}, and engine.max_adapter_rank is {options.max_adapter_rank}: "
                "raise it in model-config.yaml"
            )
        highest = max(highest, rank)
        weights[path] = down, up, _find_scaling(config, path, rank)
    return highest, weights


def read_config(folder: Path) -> Any:
    """Return peft's LoraConfig of a folder. Raises HandlerLoadError where an adapter cannot be applied."""
    file = folder / CONFIG_FILE
    try:
        if file.stat().st_size > _MAX_CONFIG_SIZE:
            raise HandlerLoadError(f"{CONFIG_FILE} is larger than {_MAX_CONFIG_SIZE} bytes")
        values = json.loads(file.read_bytes())
    except OSError:
        raise HandlerLoadError(
            f"there is no {CONFIG_FILE}: an adapter is the folder that peft's save_pretrained writes"
        ) from None
    except ValueError as error:
        raise HandlerLoadError(f"{CONFIG_FILE} is no JSON: {error}") from None
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "LORA":
        raise HandlerLoadError(f"{CONFIG_FILE}: peft_type is {kind!r}; adapters of type LORA are served")
    return _check_features(_build_config(folder))


def _build_config(folder: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fields of later versions of peft
            from peft import LoraConfig

            return LoraConfig.from_pretrained(str(folder))
    except ImportError as error:
        raise HandlerLoadError(
            f"adapters need peft, which does not load ({error}): {extras.install_command('peft')}"
        ) from error
    except (TypeError, ValueError, KeyError) as error:
        raise HandlerLoadError(f"{CONFIG_FILE}: peft does not read it: {error}") from error


def _check_features(config: Any) -> Any:
    """Raise HandlerLoadError for the first field that changes the model in a way that is not supported."""
    default = type(config)()
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.name in _SUPPORTED_FIELDS or not value or value == getattr(default, item.name):
            continue
        if item.name == "init_lora_weights" and value in _SUPPORTED_INITIALIZATIONS:
            continue
        raise HandlerLoadError(
            f"{CONFIG_FILE}: {item.name} is {value!r:.100}, which is not supported: adapters add low-rank "
            "matrices to linear layers only, without DoRA, bias, embeddings and whole modules"
        )
    return config


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS_FILE)
    except FileNotFoundError:
        raise HandlerLoadError(
            f"there is no {WEIGHTS_FILE}; pickled weights (adapter_model.bin) are not read: convert them by "
            "peft's save_pretrained"
        ) from None
    except (SafetensorError, OSError) as error:
        raise HandlerLoadError(f"{WEIGHTS_FILE} is damaged: {error}") from None


def _pair_matrices(
    tensors: Mapping[str, torch.Tensor], modules: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, suffix = name.removeprefix(_PREFIX).rpartition(".lora_")
        if suffix not in ("A.weight", "B.weight"):
            raise HandlerLoadError(
                f"{WEIGHTS_FILE}: {name} is not supported: adapters have lora_A and lora_B of linear layers "
                "only, without DoRA, bias, embeddings and whole modules"
            )
        if path not in modules:
            raise HandlerLoadError(
                f"{WEIGHTS_FILE}: the base model has no layer {path} that adapters apply to: the adapter is "
                "of another model, or it adapts lm_head, embeddings or experts, which is not supported"
            )
        pairs.setdefault(path, {})[suffix[0]] = tensor
    if not pairs or any(len(pair) < 2 for pair in pairs.values()):
        raise HandlerLoadError(f"{WEIGHTS_FILE} is incomplete: each adapted layer has lora_A and lora_B")
    return {path: (pair["A"], pair["B"]) for path, pair in pairs.items()}


def _check_shapes(path: str, down: torch.Tensor, up: torch.Tensor, widths: tuple[int, int]) -> int:
    """Return the rank of a module's matrices."""
    inputs, outputs = widths
    rank = down.shape[0] if down.dim() else 0
    if not rank or tuple(down.shape) != (rank, inputs) or tuple(up.shape) != (outputs, rank):
        raise HandlerLoadError(
            f"{WEIGHTS_FILE}: lora_A and lora_B of {path} are {tuple(down.shape)} and {tuple(up.shape)}, and "
            f"the base model's layer takes {(rank, inputs)} and {(outputs, rank)}: the adapter is of another "
            "model"
        )
    return rank


def _find_scaling(config: Any, path: str, rank: int) -> float:
    from peft.utils.other import get_pattern_key

    configured = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), config.r)
    if configured != rank:
        raise HandlerLoadError(
            f"{path} has the rank {rank} in {WEIGHTS_FILE} and {configured} in {CONFIG_FILE}"
        )
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), path), config.lora_alpha)
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _read_name(folder: Path) -> str | None:
    """Return the name on the Hub that older versions of transformers write into a model's config.json."""
    try:
        return json.loads((folder / "config.json").read_bytes()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None


def _is_hub_name(name: Any) -> bool:
    return isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))


def unknown_adapter(name: str, names: Iterable[str]) -> PredictionException:
    """Return the error of a request for an adapter that the model does not have."""
    known = ", ".join(sorted(names)) or "none"
    return PredictionException(f"This model has no adapter {name!r}. Its adapters: {known}.", 404)
