"""Embeddings of texts: a vector per token, or one for the whole text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import FLAG, TaskInput, TextTask, to_cpu_float32


class _EmbeddingTask(TextTask):
    """A task whose explanations compare two texts by their vectors."""

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool the tokens' vectors of each text: rows x tokens x width, with a mask of rows x tokens x 1."""
        return _pool_mean(hidden, mask)

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token to the cosine similarity with another text, ``target``."""
        other = options.target
        if not isinstance(other, str) or not other.strip():
            raise PredictionException(
                f"The explanation of {'an embedding' if other is None else repr(other)[:100]} needs two "
                'texts: the one that is explained as "inputs" (of a form, data), and the one that it is '
                'compared with as "target".',
                400,
            )
        encoded = self.encode([example])

        def text_vectors(output: Any, inputs: Any) -> torch.Tensor:
            hidden = output.last_hidden_state.float()
            mask = inputs["attention_mask"].to(hidden.device, hidden.dtype).clone().unsqueeze(-1)
            return self.pool(hidden, mask.expand(len(hidden), -1, -1))

        with torch.inference_mode():
            compared = self.encode([TaskInput(*self.parse_inputs(other), {})])
            other_vector = text_vectors(self.forward(model, compared, model.device), compared)
        with torch.inference_mode(False):
            vector = other_vector.clone()
        explanation = attributions.attribute_encoded(
            model,
            self.tokenizer,
            encoded,
            self.text_mask(encoded),
            options.for_target(0),
            lambda output: torch.cosine_similarity(text_vectors(output, encoded), vector),
        )
        return {"target": other, **explanation}


class FeatureExtraction(_EmbeddingTask):
    """A task that answers the vector of each token, as nested lists."""

    auto_class = "AutoModel"
    accepts_pairs = True
    optional_weights = ("pooler.",)  # the hidden states do not depend on it

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        hidden, mask = to_cpu_float32(output.last_hidden_state), encoded["attention_mask"].cpu().bool()
        return [vectors[row_mask].tolist() for vectors, row_mask in zip(hidden, mask)]


class SentenceEmbedding(_EmbeddingTask):
    """A task that answers one vector of norm 1 per text: the mean of its tokens', or as ``1_Pooling``
    configures.

    ``normalize: false`` keeps the norm. With ``tokens: true`` the answer is ``{"embedding", "tokens"}`` with
    the number of tokens that the model read. modules.json configures the folders of sentence-transformers.
    """

    auto_class = "AutoModel"
    optional_weights = ("pooler.",)
    parameters = {"normalize": FLAG, "tokens": FLAG}

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        self._pools = [_POOLS[name] for name in _pooling_names(directory)]
        config_file = _read_json(directory / "sentence_bert_config.json")
        if max_length := config_file.get("max_seq_length"):
            self.max_length = min(max_length, self.max_length or max_length)
        self._lower = config_file.get("do_lower_case") is True

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        text, pair = super().parse_inputs(value)
        return (text.lower() if self._lower else text), pair

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([pool(hidden, mask) for pool in self._pools], dim=-1)

    def postprocess(
        self, output: Any, encoded: Any, examples: Sequence[TaskInput]
    ) -> torch.Tensor | list[Any]:
        hidden = output.last_hidden_state.float()
        mask = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        vectors = self.pool(hidden, mask)
        normalized = torch.nn.functional.normalize(vectors, dim=-1)
        if not any(example.parameters for example in examples):
            return normalized
        original, counts = vectors.tolist(), encoded["attention_mask"].sum(dim=1).tolist()
        answers: list[Any] = []
        for example, unit_vector, own_vector, count in zip(examples, normalized.tolist(), original, counts):
            vector = unit_vector if example.parameters.get("normalize", True) else own_vector
            answers.append(
                {"embedding": vector, "tokens": count} if example.parameters.get("tokens") else vector
            )
        return answers


def _pool_cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # the first token that is no padding
    return hidden[torch.arange(len(hidden)), mask.squeeze(-1).argmax(dim=1)]


def _pool_last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return hidden[torch.arange(len(hidden)), (mask.squeeze(-1) * positions).argmax(dim=1)]


def _pool_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)


def _pool_mean_sqrt(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9).sqrt()


def _pool_max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask == 0, -torch.inf).amax(dim=1)


# The names of sentence-transformers; several poolings are concatenated in this order.
_POOLS = {
    "cls": _pool_cls,
    "lasttoken": _pool_last,
    "max": _pool_max,
    "mean": _pool_mean,
    "mean_sqrt_len_tokens": _pool_mean_sqrt,
}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


def _pooling_names(directory: Path) -> list[str]:
    """Return the names of the folder's poolings; the default is the mean.

    Raises HandlerLoadError for unsupported modules or poolings.
    """
    pooling_directory = directory / "1_Pooling"
    for module in _read_json(directory / "modules.json", []):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _MODULES:
            raise HandlerLoadError(
                f"{directory}: its modules.json has a {kind}, and only {', '.join(_MODULES)} are served; "
                "write a handler that runs it"
            )
        if kind == "Pooling":
            pooling_directory = directory / module.get("path", "")
    config = _read_json(pooling_directory / "config.json")
    mode = config.get("pooling_mode")
    enabled = [name for flag, name in _FLAGS.items() if config.get(flag)]
    names = [mode] if isinstance(mode, str) else mode or enabled
    unknown = [name for name in names if name not in _POOLS]
    if unknown:
        raise HandlerLoadError(
            f"{pooling_directory}: the pooling {unknown[0]!r} is not served; there are {', '.join(_POOLS)}"
        )
    return names or ["mean"]


def _read_json(file: Path, missing: Any = None) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return {} if missing is None else missing
    except ValueError as error:
        raise HandlerLoadError(f"{file}: this is not JSON: {error}") from error
