"""Why an answer is what it is: what may be asked, and integrated gradients, or perturbation where there are none.

Captum is imported when somebody asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from handlers import perturbation
from handlers.errors import HandlerLoadError, PredictionException

logger = logging.getLogger(__name__)

GRADIENTS = "integrated_gradients"
METHODS = (GRADIENTS, *perturbation.METHODS)
_WHOLE = {"steps": 1000, "internal_batch_size": 4096}  # and the most that they may be


@dataclasses.dataclass(frozen=True)
class Question:
    """``explain:`` of model-config.yaml, and by the same names the fields of a request, which go before it.

    Without a ``method`` it is integrated gradients for a model that has gradients, and feature_ablation for
    another. ``steps`` are the points on integrated gradients' path (15 for images, 50 for texts), or
    shapley's permutations (10); ``internal_batch_size`` the rows that the model gets at once.
    """

    method: str | None = None
    steps: int | None = None
    internal_batch_size: int | None = None
    target: Any = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Question:
        """What the whole model-config.yaml says. Raises HandlerLoadError."""
        block = config.get("explain")
        if block is None:
            return cls()
        keys = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(block, Mapping):
            raise HandlerLoadError(f"model-config.yaml: explain is {block!r}; write explain: {{method: {GRADIENTS}}}.")
        for key in block:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys)}."
                raise HandlerLoadError(f"model-config.yaml: explain has no key {key!r}; {hint}")
        try:
            return cls(**{key: _read(key, value) for key, value in block.items() if value is not None})
        except ValueError as error:
            raise HandlerLoadError(f"model-config.yaml: explain.{error}") from None

    def of(self, row: Any, target: Any) -> Question:
        """The question of a row that asks about output ``target``. Raises PredictionException (400)."""
        said = {key: row.get(key) for key in ("method", *_WHOLE)} if isinstance(row, Mapping) else {}
        try:
            read = {key: _read(key, value) for key, value in said.items() if value not in (None, "", b"")}
        except ValueError as error:
            raise PredictionException(f"This explanation cannot be given: {error}", 400) from None
        return dataclasses.replace(self, target=target, **read)


def _read(key: str, value: Any) -> Any:
    """A value as YAML, JSON or a form has it; ValueError with the cure."""
    if key == "target":
        return value
    if isinstance(value, (bytes, bytearray)):
        value = value.decode(errors="replace")
    if key == "method":
        if value not in METHODS:
            near = difflib.get_close_matches(str(value), METHODS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
            raise ValueError(f"method is {value!r}; {hint}")
        return value
    with contextlib.suppress(ValueError):
        value = int(value) if isinstance(value, str) else value
    if type(value) is not int or not 1 <= value <= _WHOLE[key]:
        raise ValueError(f"{key} is {value!r}; write a whole number from 1 to {_WHOLE[key]}")
    return value


def attributions(
    forward: Callable[[torch.Tensor], Any], inputs: torch.Tensor, question: Question, baseline: Any = 0
) -> torch.Tensor:
    """What each number of ``inputs`` (rows first) had to do with the output that is asked about; shaped as they are.

    ``forward`` is a module, a session or any other callable; its answer a tensor or array with the rows
    first, or what has such a one as ``logits`` or in the first place. Those of integrated gradients and of
    shapley sum to ``forward(inputs) - forward(baseline)``, a row. Raises PredictionException: 400 for a target
    or a method that the model has not, 501 without Captum.
    """
    with of_output(question.target):
        inputs = inputs.clone()  # one that was made in inference mode would stop gradients
        if question.method in (None, GRADIENTS):
            if has_gradients(forward, inputs):
                return _integrated(forward, inputs, baseline, question, 15)
            _refuse_gradients(question)
        return _perturbed(forward, inputs, baseline, question)


def of_tokens(
    forward: Callable[[torch.Tensor], Any],
    layer: torch.nn.Module | None,
    ids: torch.Tensor,
    blank: torch.Tensor,
    question: Question,
) -> torch.Tensor:
    """What each token had to do with it: a number each, or of integrated gradients one for each part of its embedding.

    ``ids`` and ``blank`` are one row of tokens, and the row that says nothing; ``forward`` takes rows of them.
    ``layer`` is the model's nn.Embedding or nn.EmbeddingBag; without it, or where it is in a graph, they are perturbed.
    """
    with of_output(question.target):
        ids, blank = ids.clone(), blank.clone()  # made in inference mode they would stop gradients
        if question.method in (None, GRADIENTS):
            if layer is not None:
                embedded = _Embedded(forward, layer, ids)
                vectors = embedded.vectors(ids)
                if has_gradients(embedded, vectors):
                    return _integrated(embedded, vectors, embedded.vectors(blank), question, 50)[0]
            _refuse_gradients(question)
        return _perturbed(forward, ids[None], blank[None], question)[0]


def of_text(
    model: Any, tokenizer: Any, text: str, question: Question, pair: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """A classifier of transformers' kind, explained: its ``tokens``, and an attribution for each.

    ``pair`` is the second text where it reads two, and ``limit`` the most tokens of both, if not the tokenizer's own.
    They sum to ``score - baseline_score``, within what the steps allow: the output that is asked about for
    the text, and for one of as many paddings.
    """
    how = {"truncation": True, "max_length": limit, "return_tensors": "pt", "return_special_tokens_mask": True}
    encoded = dict(tokenizer(text, pair, **how))
    special = encoded.pop("special_tokens_mask")[0].bool()
    known = inspect.signature(getattr(model, "forward", model)).parameters.values()
    if all(one.kind is not one.VAR_KEYWORD for one in known):  # a tokenizer may tell more than a model takes
        encoded = {one.name: encoded[one.name] for one in known if one.name in encoded}
    device = getattr(model, "device", torch.device("cpu"))
    ids = encoded.pop("input_ids")[0].to(device)
    silent = next((n for n in (tokenizer.pad_token_id, tokenizer.unk_token_id) if n is not None), 0)
    blank = torch.where(special.to(device), ids, silent)

    def forward(rows: torch.Tensor) -> Any:
        others = {name: value.to(device).expand(len(rows), -1) for name, value in encoded.items()}
        return model(input_ids=rows, **others)

    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    found = of_tokens(forward, layer, ids, blank, question)
    score, baseline_score = scores(forward, torch.stack((ids, blank)), question.target)
    return {
        "tokens": tokenizer.convert_ids_to_tokens(ids.tolist()),
        "attributions": (found.sum(-1) if found.dim() == 2 else found).tolist(),
        "score": score,
        "baseline_score": baseline_score,
    }


def scores(forward: Callable[[torch.Tensor], Any], inputs: torch.Tensor, target: Any) -> list[float]:
    """Output ``target`` for each row: what attributions are parts of."""
    with torch.inference_mode():
        return _tensor(forward(inputs))[:, target].tolist()


def has_gradients(forward: Callable[[torch.Tensor], Any], inputs: torch.Tensor) -> bool:
    """Whether the first row's output can be traced back to it. What ``forward`` itself raises is raised."""
    first = inputs[:1]
    if not first.is_floating_point():
        return False
    leaf = first.detach().clone().requires_grad_()
    try:
        return torch.autograd.grad(_tensor(forward(leaf)).sum(), leaf, allow_unused=True)[0] is not None
    except Exception as error:  # sessions, fused and frozen graphs fail in as many ways
        logger.debug("The model has no gradients: %s", error)
        with torch.no_grad():
            forward(first)
        return False


class _Embedded:
    """The model from its embedding's output on."""

    def __init__(self, forward: Callable[[torch.Tensor], Any], layer: torch.nn.Module, ids: torch.Tensor) -> None:
        self._forward = forward
        self._layer = layer
        self._ids = ids

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding of each token: 1 x tokens x parts."""
        bag = isinstance(self._layer, torch.nn.EmbeddingBag)
        with torch.no_grad():
            return self._layer(ids[:, None])[None] if bag else self._layer(ids[None])

    def __call__(self, vectors: torch.Tensor) -> Any:
        def instead(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if isinstance(layer, torch.nn.EmbeddingBag):
                return {"sum": vectors.sum, "mean": vectors.mean, "max": vectors.amax}[layer.mode](dim=1)
            return vectors.reshape(output.shape)

        hook = self._layer.register_forward_hook(instead)
        try:
            return self._forward(self._ids.expand(len(vectors), -1))
        finally:
            hook.remove()


def _integrated(forward: Any, inputs: torch.Tensor, baseline: Any, question: Question, steps: int) -> torch.Tensor:
    at_once = question.internal_batch_size
    return integrated_gradients(lambda rows: _tensor(forward(rows))).attribute(
        inputs,
        baselines=baseline,
        target=question.target,
        n_steps=question.steps or steps,
        internal_batch_size=max(at_once, len(inputs)) if at_once else None,
    )


def _perturbed(forward: Any, inputs: torch.Tensor, baseline: Any, question: Question) -> torch.Tensor:
    return perturbation.attributions(
        _captum(),
        question.method or "feature_ablation",
        lambda rows: _tensor(forward(rows)),
        inputs,
        baseline,
        target=question.target,
        permutations=question.steps or 10,
        at_once=question.internal_batch_size or 64,
    )


def _refuse_gradients(question: Question) -> None:
    if question.method == GRADIENTS:
        others = ", ".join(perturbation.METHODS)
        raise PredictionException(f"The model has no gradients, which {GRADIENTS} needs; ask for one of {others}.", 400)


def _tensor(output: Any) -> torch.Tensor:
    """A model's answer as numbers, rows x outputs."""
    if hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else next(iter(output.values()))
    elif isinstance(output, (tuple, list)):
        output = output[0]
    values = torch.as_tensor(output)
    if not values.is_floating_point():
        values = values.float()
    return values[:, None] if values.dim() == 1 else values


def integrated_gradients(model: Any) -> Any:
    """``captum.attr.IntegratedGradients`` of ``model``; PredictionException (501) without Captum."""
    return _captum().IntegratedGradients(model)


def layer_integrated_gradients(model: Any, layer: torch.nn.Module) -> Any:
    """``captum.attr.LayerIntegratedGradients`` of ``layer`` in ``model``; PredictionException (501) without Captum."""
    return _captum().LayerIntegratedGradients(model, layer)


def _captum() -> Any:
    try:
        from captum import attr
    except ImportError as error:
        raise PredictionException(
            "Explanations need Captum, which is not installed where this model runs: install torchrelay[explain], or "
            "name captum in the archive's requirements.",
            501,
        ) from error
    return attr


@contextlib.contextmanager
def of_output(target: Any) -> Iterator[None]:
    """With gradients, whatever the caller's mode; a ``target`` that the model has not is the request's error (400)."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except (IndexError, AssertionError) as error:  # Captum's two ways to say so
        if not _raised_in_captum(error):
            raise
        raise PredictionException(f"The model has no output {target!r} to explain: {error}", 400) from error


def _raised_in_captum(error: BaseException) -> bool:
    """Rather than in the author's model."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("captum.")
