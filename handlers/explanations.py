"""Why an answer is what it is: what may be asked, and integrated gradients, or perturbation where there are none.

Captum is imported when somebody asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from handlers import perturbation
from handlers.errors import HandlerLoadError, PredictionException

logger = logging.getLogger(__name__)

GRADIENTS = "integrated_gradients"
METHODS = (GRADIENTS, *perturbation.METHODS)
_WHOLE = {"steps": 1000, "internal_batch_size": 4096}  # and the most that they may be
_STANCE = threading.RLock()  # the compiler's is the process's


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
    def read(cls, config: Mapping[str, Any], target: Any = 0) -> Question:
        """What the whole model-config.yaml says; ``target`` where it does not. Raises HandlerLoadError."""
        block = config.get("explain")
        if block is None:
            return cls(target=target)
        keys = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(block, Mapping):
            raise HandlerLoadError(f"model-config.yaml: explain is {block!r}; write explain: {{method: {GRADIENTS}}}.")
        for key in block:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys)}."
                raise HandlerLoadError(f"model-config.yaml: explain has no key {key!r}; {hint}")
        try:
            said = {key: _read(key, value) for key, value in block.items() if value is not None}
            return cls(**{"target": target, **said})
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

    def about(self, target: Any) -> Question:
        """The same of another output."""
        return dataclasses.replace(self, target=target)


class Found(NamedTuple):
    """The ``attributions`` of a text's tokens, which are parts of ``score - baseline_score``.

    A number for each token, or of integrated gradients one for each part of its embedding.
    """

    attributions: torch.Tensor
    score: float
    baseline_score: float


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
    layers: Sequence[torch.nn.Module],
    ids: torch.Tensor,
    blank: torch.Tensor,
    question: Question,
) -> Found:
    """What each token had to do with the output that is asked about.

    ``ids`` and ``blank`` are one row of tokens, and the row that says nothing; ``forward`` takes rows of them.
    ``layers`` are the model's nn.Embedding or nn.EmbeddingBag, several where it has the same one in several places;
    without them, or where they are in a graph, tokens are perturbed: those that ``blank`` has not.
    """
    with of_output(question.target):
        ids, blank = ids.clone(), blank.clone()  # made in inference mode they would stop gradients
        if question.method in (None, GRADIENTS):
            if layers:
                embedded = _Embedded(forward, layers, ids)
                vectors, blanks = embedded.vectors(ids), embedded.vectors(blank)
                if has_gradients(embedded, vectors):
                    [found] = _integrated(embedded, vectors, blanks, question, 50)
                    return Found(found, *scores(embedded, torch.cat((vectors, blanks)), question.target))
            _refuse_gradients(question)
        found, free = torch.zeros(len(ids)), ids != blank

        def freely(parts: torch.Tensor) -> Any:
            rows = ids.repeat(len(parts), 1)
            rows[:, free] = parts
            return forward(rows)

        if free.any():
            found[free.cpu()] = _perturbed(freely, ids[None, free], blank[None, free], question)[0].float().cpu()
        return Found(found, *scores(forward, torch.stack((ids, blank)), question.target))


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
    words = ~encoded.pop("special_tokens_mask")[0].bool()
    known = inspect.signature(getattr(model, "forward", model)).parameters.values()
    if all(one.kind is not one.VAR_KEYWORD for one in known):  # a tokenizer may tell more than a model takes
        encoded = {one.name: encoded[one.name] for one in known if one.name in encoded}
    return of_encoded(model, tokenizer, encoded, words, question)


def of_encoded(
    model: Any,
    tokenizer: Any,
    encoded: Mapping[str, torch.Tensor],
    words: torch.Tensor,
    question: Question,
    score: Callable[[Any], torch.Tensor] | None = None,
    layer: torch.nn.Module | None = None,
    **fixed: Any,
) -> dict[str, Any]:
    """``of_text`` of any output, for a text that is the model's input already: of each tensor one row.

    ``words`` says of each token whether it may be taken away; the others have no attribution. ``score`` makes of the
    model's output a number a row, or rows x outputs: its logits unless said. ``layer`` is the embedding that reads the
    text, where it is not the model's own, and ``fixed`` what the model is told beside.
    """
    device = getattr(model, "device", torch.device("cpu"))
    with torch.inference_mode(False):  # what was made in it could not be multiplied with what has gradients
        inputs = {name: value.to(device).clone() for name, value in encoded.items()}
        words = words.to(device).clone()
    ids = inputs.pop("input_ids")[0]
    silent = next((n for n in (tokenizer.pad_token_id, tokenizer.unk_token_id) if n is not None), 0)

    def forward(rows: torch.Tensor) -> Any:
        others = {name: value.expand(len(rows), *value.shape[1:]) for name, value in inputs.items()}
        output = model(input_ids=rows, **others, **fixed)
        return output if score is None else score(output)

    layers = _embeddings(model) if layer is None else [layer]
    found = of_tokens(forward, layers, ids, torch.where(words, silent, ids), question)
    by_part = found.attributions.float()
    by_token = by_part.sum(-1) if by_part.dim() == 2 else by_part
    return {
        "tokens": tokenizer.convert_ids_to_tokens(ids.tolist()),
        "attributions": by_token.tolist(),
        "score": found.score,
        "baseline_score": found.baseline_score,
    }


def _embeddings(model: Any) -> list[torch.nn.Module]:
    """The model's embedding of tokens, and what shares its weights: an encoder and a decoder have one each."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if layer is None:
        return []
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    twins = [one for one in modules if isinstance(one, torch.nn.Embedding) and one.weight is layer.weight]
    return [layer, *(one for one in twins if one is not layer)]


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

    def __init__(
        self, forward: Callable[[torch.Tensor], Any], layers: Sequence[torch.nn.Module], ids: torch.Tensor
    ) -> None:
        self._forward = forward
        self._layers = layers
        self._ids = ids

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding of each token: 1 x tokens x parts."""
        layer = self._layers[0]
        bag = isinstance(layer, torch.nn.EmbeddingBag)
        with torch.no_grad():
            return layer(ids[:, None])[None] if bag else layer(ids[None])

    def __call__(self, vectors: torch.Tensor) -> Any:
        rows = self._ids.expand(len(vectors), -1)
        thread, first = threading.get_ident(), True

        def instead(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            nonlocal first
            if threading.get_ident() != thread:  # a prediction beside this
                return None
            read, first = first, False
            if isinstance(layer, torch.nn.EmbeddingBag):
                return {"sum": vectors.sum, "mean": vectors.mean, "max": vectors.amax}[layer.mode](dim=1)
            if read or (args and torch.equal(args[0], rows)):
                return vectors.reshape(output.shape)
            if args and args[0].shape == rows.shape and torch.equal(args[0][:, 1:], rows[:, :-1]):
                return torch.cat((output[:, :1], vectors[:, :-1]), 1)  # a decoder reads it again, one place on
            return None

        hooks = [layer.register_forward_hook(instead) for layer in self._layers]
        try:
            return self._forward(rows)
        finally:
            for hook in hooks:
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
        with _uncompiled(), torch.inference_mode(False), torch.enable_grad():
            yield
    except (IndexError, AssertionError) as error:  # Captum's two ways to say so
        if not _raised_in_captum(error):
            raise
        raise PredictionException(f"The model has no output {target!r} to explain: {error}", 400) from error


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """A compiled model as it was written: what would be compiled now had our hooks in it, for predictions too."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield


def _raised_in_captum(error: BaseException) -> bool:
    """Rather than in the author's model."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("captum.")
