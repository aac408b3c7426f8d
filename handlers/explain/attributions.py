"""Explanations: their options, and attributions by integrated gradients or, without gradients, perturbation.

Captum is imported at the first explanation.
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

from handlers import extras
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import occlusion
from handlers.row_parsing import resolve_target

logger = logging.getLogger(__name__)

GRADIENTS = "integrated_gradients"
METHODS = (GRADIENTS, *occlusion.METHODS)
_MAX_VALUES = {"steps": 1000, "internal_batch_size": 4096}
_STANCE_LOCK = threading.RLock()  # the compiler's stance is global


@dataclasses.dataclass(frozen=True)
class ExplanationOptions:
    """The ``explain:`` options of model-config.yaml; the fields of a request have the same names and
    precedence.

    The default ``method`` is integrated gradients for a model with gradients, else feature_ablation.
    ``steps`` is the number of points on integrated gradients' path (15 for images, 50 for texts) or of
    shapley's permutations (10). ``internal_batch_size`` is the number of rows per call of the model.
    """

    method: str | None = None
    steps: int | None = None
    internal_batch_size: int | None = None
    target: Any = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Any = 0) -> ExplanationOptions:
        """Parse a whole model-config.yaml; ``target`` is its default. Raises HandlerLoadError."""
        block = config.get("explain")
        if block is None:
            return cls(target=target)
        keys = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(block, Mapping):
            raise HandlerLoadError(
                f"model-config.yaml: explain is {block!r}; write explain: {{method: {GRADIENTS}}}."
            )
        for key in block:
            if key not in keys:
                matches = difflib.get_close_matches(str(key), keys, 1)
                hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(keys)}."
                raise HandlerLoadError(f"model-config.yaml: explain has no key {key!r}; {hint}")
        try:
            values = {key: _parse_option(key, value) for key, value in block.items() if value is not None}
            return cls(**{"target": target, **values})
        except ValueError as error:
            raise HandlerLoadError(f"model-config.yaml: explain.{error}") from None

    def for_row(self, row: Any, target: Any) -> ExplanationOptions:
        """Merge the options of a row, for its output ``target``. Raises PredictionException (400)."""
        values = {key: row.get(key) for key in ("method", *_MAX_VALUES)} if isinstance(row, Mapping) else {}
        try:
            options = {
                key: _parse_option(key, value)
                for key, value in values.items()
                if value not in (None, "", b"")
            }
        except ValueError as error:
            raise PredictionException(f"This explanation cannot be given: {error}", 400) from None
        return dataclasses.replace(self, target=resolve_target(target), **options)

    def for_target(self, target: Any) -> ExplanationOptions:
        """Return a copy for another output."""
        return dataclasses.replace(self, target=target)


class TextAttributions(NamedTuple):
    """The ``attributions`` of a text's tokens, which sum to ``score - baseline_score``.

    There is a number per token, or from integrated gradients one per element of its embedding.
    """

    attributions: torch.Tensor
    score: float
    baseline_score: float


def _parse_option(key: str, value: Any) -> Any:
    """Parse a value of YAML, JSON or a form. Raises ValueError with the cure."""
    if key == "target":
        return value
    if isinstance(value, (bytes, bytearray)):
        value = value.decode(errors="replace")
    if key == "method":
        if value not in METHODS:
            matches = difflib.get_close_matches(str(value), METHODS, 1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(METHODS)}"
            raise ValueError(f"method is {value!r}; {hint}")
        return value
    with contextlib.suppress(ValueError):
        value = int(value) if isinstance(value, str) else value
    if type(value) is not int or not 1 <= value <= _MAX_VALUES[key]:
        raise ValueError(f"{key} is {value!r}; write a whole number from 1 to {_MAX_VALUES[key]}")
    return value


def attribute(
    forward: Callable[[torch.Tensor], Any],
    inputs: torch.Tensor,
    options: ExplanationOptions,
    baseline: Any = 0,
) -> torch.Tensor:
    """Return the attribution of each number of ``inputs`` (rows first) to the output ``options.target``.

    ``forward`` is a module, a session or any other callable. It returns a tensor or array with the rows
    first, or an object with one as ``logits`` or as its first item. For each row, the attributions of
    integrated gradients and of shapley sum to ``forward(inputs) - forward(baseline)``. Raises
    PredictionException: 400 for a target or method that the model does not have, 501 without Captum.
    """
    with gradients_enabled(options.target):
        inputs = inputs.clone()  # an inference tensor would stop gradients
        if options.method in (None, GRADIENTS):
            if has_gradients(forward, inputs):
                return _integrate_gradients(forward, inputs, baseline, options, 15)
            _reject_gradient_method(options)
        return _perturb(forward, inputs, baseline, options)


def attribute_tokens(
    forward: Callable[[torch.Tensor], Any],
    layers: Sequence[torch.nn.Module],
    ids: torch.Tensor,
    baseline: torch.Tensor,
    options: ExplanationOptions,
) -> TextAttributions:
    """Return the attribution of each token to the output ``options.target``.

    ``ids`` is a row of tokens and ``baseline`` the neutral row; ``forward`` takes rows of them. ``layers``
    are the model's nn.Embedding or nn.EmbeddingBag modules that share the weights. Without them, or inside a
    graph, the tokens that differ from ``baseline`` are perturbed.
    """
    with gradients_enabled(options.target):
        ids, baseline = ids.clone(), baseline.clone()  # inference tensors would stop gradients
        if options.method in (None, GRADIENTS):
            if layers:
                embedded = _EmbeddedModel(forward, layers, ids)
                vectors, baselines = embedded.embed(ids), embedded.embed(baseline)
                if has_gradients(embedded, vectors):
                    [values] = _integrate_gradients(embedded, vectors, baselines, options, 50)
                    scores = output_scores(embedded, torch.cat((vectors, baselines)), options.target)
                    return TextAttributions(values, *scores)
            _reject_gradient_method(options)
        values, variable = torch.zeros(len(ids)), ids != baseline

        def forward_variable(parts: torch.Tensor) -> Any:
            rows = ids.repeat(len(parts), 1)
            rows[:, variable] = parts
            return forward(rows)

        if variable.any():
            [perturbed] = _perturb(forward_variable, ids[None, variable], baseline[None, variable], options)
            values[variable.cpu()] = perturbed.float().cpu()
        scores = output_scores(forward, torch.stack((ids, baseline)), options.target)
        return TextAttributions(values, *scores)


def attribute_text(
    model: Any,
    tokenizer: Any,
    text: str,
    options: ExplanationOptions,
    pair: str | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Explain a classifier with transformers' interface: return its ``tokens`` and an attribution for each.

    ``pair`` is the second text of a model that reads two. ``max_length`` limits the tokens of both; the
    default is the tokenizer's. The attributions sum, within the precision of the steps, to ``score -
    baseline_score``: the output ``options.target`` for the text, and for as many padding tokens.
    """
    tokenizer_options = {
        "truncation": True,
        "max_length": max_length,
        "return_tensors": "pt",
        "return_special_tokens_mask": True,
    }
    encoded = dict(tokenizer(text, pair, **tokenizer_options))
    text_mask = ~encoded.pop("special_tokens_mask")[0].bool()
    parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    # A tokenizer may return more than a model accepts.
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        names = [parameter.name for parameter in parameters]
        encoded = {name: encoded[name] for name in names if name in encoded}
    return attribute_encoded(model, tokenizer, encoded, text_mask, options)


def attribute_encoded(
    model: Any,
    tokenizer: Any,
    encoded: Mapping[str, torch.Tensor],
    text_mask: torch.Tensor,
    options: ExplanationOptions,
    score: Callable[[Any], torch.Tensor] | None = None,
    layer: torch.nn.Module | None = None,
    **fixed: Any,
) -> dict[str, Any]:
    """Explain any output for an encoded text, as ``attribute_text`` does; each tensor has one row.

    ``text_mask`` selects the tokens that may be perturbed; the others get no attribution. ``score`` converts
    the model's output to a number per row, or to rows x outputs; the default takes its logits. ``layer`` is
    the embedding of the text if it is not the model's own. ``fixed`` are further arguments of the model.
    """
    device = getattr(model, "device", torch.device("cpu"))
    # inference tensors cannot be multiplied with tensors that need gradients
    with torch.inference_mode(False):
        inputs = {name: value.to(device).clone() for name, value in encoded.items()}
        text_mask = text_mask.to(device).clone()
    ids = inputs.pop("input_ids")[0]
    neutral = next((n for n in (tokenizer.pad_token_id, tokenizer.unk_token_id) if n is not None), 0)

    def forward(rows: torch.Tensor) -> Any:
        other_inputs = {name: value.expand(len(rows), *value.shape[1:]) for name, value in inputs.items()}
        output = model(input_ids=rows, **other_inputs, **fixed)
        return output if score is None else score(output)

    layers = _shared_embeddings(model) if layer is None else [layer]
    found = attribute_tokens(forward, layers, ids, torch.where(text_mask, neutral, ids), options)
    values = found.attributions.float()
    by_token = values.sum(-1) if values.dim() == 2 else values
    return {
        "tokens": tokenizer.convert_ids_to_tokens(ids.tolist()),
        "attributions": by_token.tolist(),
        "score": found.score,
        "baseline_score": found.baseline_score,
    }


def _shared_embeddings(model: Any) -> list[torch.nn.Module]:
    """Return the model's token embedding and those that share its weights, as of an encoder and a decoder."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if layer is None:
        return []
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    shared = [m for m in modules if isinstance(m, torch.nn.Embedding) and m.weight is layer.weight]
    return [layer, *(module for module in shared if module is not layer)]


def output_scores(forward: Callable[[torch.Tensor], Any], inputs: torch.Tensor, target: Any) -> list[float]:
    """Return the output ``target`` for each row, of which attributions are parts."""
    with torch.inference_mode():
        return _to_tensor(forward(inputs))[:, resolve_target(target)].tolist()


def has_gradients(forward: Callable[[torch.Tensor], Any], inputs: torch.Tensor) -> bool:
    """Return whether the first row's output has a gradient. Errors of ``forward`` itself are raised."""
    first = inputs[:1]
    if not first.is_floating_point():
        return False
    leaf = first.detach().clone().requires_grad_()
    try:
        return torch.autograd.grad(_to_tensor(forward(leaf)).sum(), leaf, allow_unused=True)[0] is not None
    except Exception as error:  # sessions, fused graphs and frozen graphs raise different errors
        logger.debug("The model has no gradients: %s", error)
        with torch.no_grad():
            forward(first)
        return False


class _EmbeddedModel:
    """The part of a model behind its embedding."""

    def __init__(
        self, forward: Callable[[torch.Tensor], Any], layers: Sequence[torch.nn.Module], ids: torch.Tensor
    ) -> None:
        self._forward = forward
        self._layers = layers
        self._ids = ids

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding of each token: 1 x tokens x elements."""
        layer = self._layers[0]
        bag = isinstance(layer, torch.nn.EmbeddingBag)
        with torch.no_grad():
            return layer(ids[:, None])[None] if bag else layer(ids[None])

    def __call__(self, vectors: torch.Tensor) -> Any:
        rows = self._ids.expand(len(vectors), -1)
        thread, first = threading.get_ident(), True

        def replace_output(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            nonlocal first
            if threading.get_ident() != thread:  # a concurrent prediction
                return None
            is_first, first = first, False
            if isinstance(layer, torch.nn.EmbeddingBag):
                return {"sum": vectors.sum, "mean": vectors.mean, "max": vectors.amax}[layer.mode](dim=1)
            if is_first or (args and torch.equal(args[0], rows)):
                return vectors.reshape(output.shape)
            if args and args[0].shape == rows.shape and torch.equal(args[0][:, 1:], rows[:, :-1]):
                # A decoder reads the tokens again, shifted by one position.
                return torch.cat((output[:, :1], vectors[:, :-1]), 1)
            return None

        hooks = [layer.register_forward_hook(replace_output) for layer in self._layers]
        try:
            return self._forward(rows)
        finally:
            for hook in hooks:
                hook.remove()


def _integrate_gradients(
    forward: Any, inputs: torch.Tensor, baseline: Any, options: ExplanationOptions, default_steps: int
) -> torch.Tensor:
    batch_size = options.internal_batch_size
    return integrated_gradients(lambda rows: _to_tensor(forward(rows))).attribute(
        inputs,
        baselines=baseline,
        target=options.target,
        n_steps=options.steps or default_steps,
        internal_batch_size=max(batch_size, len(inputs)) if batch_size else None,
    )


def _perturb(forward: Any, inputs: torch.Tensor, baseline: Any, options: ExplanationOptions) -> torch.Tensor:
    return occlusion.attribute(
        _captum(),
        options.method or "feature_ablation",
        lambda rows: _to_tensor(forward(rows)),
        inputs,
        baseline,
        target=options.target,
        permutations=options.steps or 10,
        batch_size=options.internal_batch_size or 64,
    )


def _reject_gradient_method(options: ExplanationOptions) -> None:
    if options.method == GRADIENTS:
        others = ", ".join(occlusion.METHODS)
        raise PredictionException(
            f"The model has no gradients, which {GRADIENTS} needs; ask for one of {others}.", 400
        )


def _to_tensor(output: Any) -> torch.Tensor:
    """Convert a model's output to rows x outputs."""
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
    """Return ``captum.attr.IntegratedGradients`` of ``model``; raise PredictionException (501) without
    Captum.
    """
    return _captum().IntegratedGradients(model)


def layer_integrated_gradients(model: Any, layer: torch.nn.Module) -> Any:
    """Return ``captum.attr.LayerIntegratedGradients`` of ``layer`` in ``model``.

    Raises PredictionException (501) without Captum.
    """
    return _captum().LayerIntegratedGradients(model, layer)


def _captum() -> Any:
    try:
        from captum import attr
    except ImportError as error:
        raise PredictionException(
            "Explanations need Captum, which is not installed where this model runs: "
            f"{extras.install_command('captum')}, or name captum in the archive's requirements.",
            501,
        ) from error
    return attr


@contextlib.contextmanager
def gradients_enabled(target: Any) -> Iterator[None]:
    """Enable gradients in any mode of the caller; a ``target`` that the model does not have raises 400."""
    indexes = target if isinstance(target, (list, tuple)) else (target,)
    if any(isinstance(index, int) and not -(2**63) <= index < 2**63 for index in indexes):
        raise PredictionException(f"The model has no output {target!r:.100} to explain.", 400)
    try:
        with _eager_mode(), torch.inference_mode(False), torch.enable_grad():
            yield
    except (IndexError, AssertionError) as error:  # Captum raises either for an unknown target
        if not _raised_in_captum(error):
            raise
        raise PredictionException(f"The model has no output {target!r} to explain: {error}", 400) from error


@contextlib.contextmanager
def _eager_mode() -> Iterator[None]:
    """Run a compiled model eagerly: a compilation now would keep our hooks, also for predictions."""
    if "torch._dynamo" not in sys.modules:  # no model is compiled
        yield
        return
    with _STANCE_LOCK, torch.compiler.set_stance("force_eager"):
        yield


def _raised_in_captum(error: BaseException) -> bool:
    """Return whether Captum, rather than the author's model, raised the error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("captum.")
