"""What a model knows of a text, as numbers: one vector for each token, or one for the whole text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from handlers import explanations
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explanations import Question
from handlers.tasks.base import FLAG, Example, TextTask, floats


class _Vectors(TextTask):
    """Texts that are compared by a vector each."""

    def pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A vector for each text, of its tokens' vectors; rows x tokens x parts, and rows x tokens x 1."""
        return _mean(hidden, mask)

    def explain(self, model: Any, example: Example, question: Question) -> Any:
        """What makes a text like another, ``target``: an attribution for each of its tokens, for the cosine of both."""
        other = question.target
        if not isinstance(other, str) or not other.strip():
            raise PredictionException(
                f"The explanation of {'an embedding' if other is None else repr(other)[:100]} needs two texts: the one "
                'that is explained as "inputs" (of a form, data), and the one that it is compared with as "target".',
                400,
            )
        encoded = self.encode([example])

        def vectors(output: Any, inputs: Any) -> torch.Tensor:
            hidden = output.last_hidden_state.float()
            mask = inputs["attention_mask"].to(hidden.device, hidden.dtype).clone().unsqueeze(-1)
            return self.pooled(hidden, mask.expand(len(hidden), -1, -1))

        with torch.inference_mode():
            compared = self.encode([Example(*self.inputs(other), {})])
            whole = vectors(self.forward(model, compared, model.device), compared)
        with torch.inference_mode(False):
            vector = whole.clone()
        found = explanations.of_encoded(
            model,
            self.tokenizer,
            encoded,
            self.words(encoded),
            question.about(0),
            lambda output: torch.cosine_similarity(vectors(output, encoded), vector),
        )
        return {"target": other, **found}


class FeatureExtraction(_Vectors):
    """For each token of the text its vector, as nested lists."""

    auto = "AutoModel"
    pairs = True
    unneeded = ("pooler.",)  # the hidden states do without

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        hidden, mask = floats(output.last_hidden_state), encoded["attention_mask"].cpu().bool()
        return [vectors[real].tolist() for vectors, real in zip(hidden, mask)]


class SentenceEmbedding(_Vectors):
    """One vector for the text, a list of floats of length 1: the mean of its tokens', or as ``1_Pooling`` says.

    ``normalize: false`` leaves its length as it is. With ``tokens: true`` it is ``{"embedding", "tokens"}``, which says
    how many tokens of the text the model read. sentence-transformers' folders say more in modules.json.
    """

    auto = "AutoModel"
    unneeded = ("pooler.",)
    parameters = {"normalize": FLAG, "tokens": FLAG}

    def __init__(self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(directory, config, options, defaults)
        self._pools = [_POOLS[name] for name in _pooling(directory)]
        own = _read(directory / "sentence_bert_config.json")
        if longest := own.get("max_seq_length"):
            self.limit = min(longest, self.limit or longest)
        self._lower = own.get("do_lower_case") is True

    def inputs(self, value: Any) -> tuple[Any, str | None]:
        text, pair = super().inputs(value)
        return (text.lower() if self._lower else text), pair

    def pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([pool(hidden, mask) for pool in self._pools], dim=-1)

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> torch.Tensor | list[Any]:
        hidden = output.last_hidden_state.float()
        mask = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        vectors = self.pooled(hidden, mask)
        unit = torch.nn.functional.normalize(vectors, dim=-1)
        if not any(example.parameters for example in examples):
            return unit
        plain, counts = vectors.tolist(), encoded["attention_mask"].sum(dim=1).tolist()
        answers: list[Any] = []
        for example, normal, own, count in zip(examples, unit.tolist(), plain, counts):
            vector = normal if example.parameters.get("normalize", True) else own
            answers.append({"embedding": vector, "tokens": count} if example.parameters.get("tokens") else vector)
        return answers


def _cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), mask.squeeze(-1).argmax(dim=1)]  # the first that is no padding


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = torch.arange(mask.shape[1], device=mask.device)
    return hidden[torch.arange(len(hidden)), (mask.squeeze(-1) * places).argmax(dim=1)]


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)


def _mean_sqrt(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9).sqrt()


def _max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask == 0, -torch.inf).amax(dim=1)


# As sentence-transformers names them; several are put one behind the other, in this order.
_POOLS = {"cls": _cls, "lasttoken": _last, "max": _max, "mean": _mean, "mean_sqrt_len_tokens": _mean_sqrt}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


def _pooling(directory: Path) -> list[str]:
    """The names of the folder's poolings; the mean where it says nothing. HandlerLoadError for what is not here."""
    place = directory / "1_Pooling"
    for module in _read(directory / "modules.json", []):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _MODULES:
            raise HandlerLoadError(
                f"{directory}: its modules.json has a {kind}, and only {', '.join(_MODULES)} are served; "
                "write a handler that runs it"
            )
        place = directory / module.get("path", "") if kind == "Pooling" else place
    said = _read(place / "config.json")
    mode = said.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode or [name for flag, name in _FLAGS.items() if said.get(flag)]
    unknown = [name for name in names if name not in _POOLS]
    if unknown:
        raise HandlerLoadError(f"{place}: the pooling {unknown[0]!r} is not served; there are {', '.join(_POOLS)}")
    return names or ["mean"]


def _read(file: Path, missing: Any = None) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return {} if missing is None else missing
    except ValueError as error:
        raise HandlerLoadError(f"{file}: this is not JSON: {error}") from error
