"""LoRA adapters of one model, of which every row of a step may use another.

peft selects adapters by the batch dimension, which has one entry in continuous batching: all rows are
concatenated along the tokens. Here a forward hook of each adapted layer adds the adapters' outputs, each to
the tokens of its own requests, so rows of different adapters and of the base model share a step.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from handlers.engines.adapter_files import AdapterOptions, read_adapter, unknown_adapter


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter on the model's device; ``weights`` holds A and scaled B of each adapted module by its path.

    Requests keep a reference, so those in flight finish after an unload.
    """

    name: str
    rank: int
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of these weights, whatever their name

    def salt(self, cache_salt: str) -> str:
        """Return the salt of a request's cached prefix, which no other adapter and not the base model has."""
        return f"{self.id} {cache_salt}"

    def __deepcopy__(self, memo: Any) -> Adapter:
        return self  # transformers copies a request's arguments when it preempts the request


class _Step(threading.local):
    """The adapters of the tokens in the step that runs on a thread."""

    def __init__(self) -> None:
        self.spans: list[tuple[Adapter, slice | torch.Tensor]] = []
        self.token_count = 0
        self.is_fixed = False  # by ``AdapterTable.apply``


class AdapterTable:
    """The adapters of a transformers model, and the hooks that apply them."""

    def __init__(self, model: torch.nn.Module, options: AdapterOptions) -> None:
        self.options = options
        self._model = model
        self._adapters: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._inputs_and_outputs: Any = None
        self._step = _Step()
        model.register_forward_pre_hook(self._begin_step)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def get(self, name: str) -> Adapter:
        """Return an adapter. Raises PredictionException 404, with the names, for an unknown one."""
        if name in self._adapters:
            return self._adapters[name]
        raise unknown_adapter(name, self._adapters)

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter in ``folder``, while requests may run. Raises HandlerLoadError with the reason."""
        if name not in self._adapters:
            self.options.check_count(self._adapters)
        modules = find_modules(self._model)
        rank, weights = read_adapter(folder, modules, self.options)
        parameter = next(self._model.parameters())
        moved = {
            path: (
                down.to(parameter.device, parameter.dtype),
                (up * scaling).to(parameter.device, parameter.dtype),
            )
            for path, (down, up, scaling) in weights.items()
        }
        # A hook is registered under the lock of the interpreter, so between two layers of a running step.
        for path in moved.keys() - self._hooked:
            self._model.get_submodule(path).register_forward_hook(self._make_hook(path))
            self._hooked.add(path)
        self._adapters[name] = Adapter(name, rank, moved)

    def unload(self, name: str) -> None:
        """Forget an adapter; its memory is freed after its last request. Does nothing for an unknown name."""
        self._adapters.pop(name, None)

    def attach(self, processor: Any) -> None:
        """Read the requests of later steps from a loop's batch processor."""
        self._inputs_and_outputs = processor.inputs_and_outputs

    def detach(self) -> None:
        """Forget the loop's batch processor, which holds its cache."""
        self._inputs_and_outputs = None

    @contextlib.contextmanager
    def apply(self, adapter: Adapter | None, token_count: int) -> Iterator[None]:
        """Apply an adapter to all of so many tokens in this thread's forward passes."""
        step = self._step
        step.is_fixed, step.token_count = True, token_count
        step.spans = [] if adapter is None else [(adapter, slice(0, token_count))]
        try:
            yield
        finally:
            step.is_fixed, step.spans = False, []

    def _begin_step(self, module: torch.nn.Module, args: Any) -> None:
        """Find the tokens of each adapter in the step that begins."""
        if self._step.is_fixed:
            return
        self._step.spans = []
        if self._inputs_and_outputs is None:
            return
        tokens: dict[Adapter, list[int]] = {}
        start = 0
        for row in self._inputs_and_outputs.requests_in_batch:
            adapter = _adapter_of(row.state)
            if adapter is not None:
                tokens.setdefault(adapter, []).extend(range(start, start + row.query_length))
            start += row.query_length
        self._step.token_count = start
        self._step.spans = [(adapter, self._to_index(indices)) for adapter, indices in tokens.items()]

    def _to_index(self, indices: list[int]) -> slice | torch.Tensor:
        """Return a slice of contiguous tokens, which needs no copy, or else a tensor."""
        if indices[-1] - indices[0] + 1 == len(indices):
            return slice(indices[0], indices[-1] + 1)
        return torch.tensor(indices, device=next(self._model.parameters()).device)

    def _make_hook(self, path: str) -> Any:
        def add_adapters(
            module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> None:
            step = self._step
            if not step.spans:
                return
            inputs, outputs = args[0].flatten(0, -2), output.view(-1, output.shape[-1])
            if len(inputs) != step.token_count:
                raise RuntimeError(
                    f"{path} has {len(inputs)} tokens in a step of {step.token_count}: adapters cannot be "
                    "applied to this layer"
                )
            for adapter, index in step.spans:
                weights = adapter.weights.get(path)
                if weights is not None:
                    outputs[index] += linear(linear(inputs[index], weights[0]), weights[1])

        return add_adapters


def _adapter_of(state: Any) -> Adapter | None:
    """Return the adapter of a request in transformers' loop."""
    adapter: Adapter | None = state.logit_processor_kwargs.get("adapter")
    return adapter


def find_modules(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return the linear layers to which adapters apply: their paths, and the widths of input and output.

    Output embeddings run on the last tokens only, and experts on the tokens that are routed to them.
    """
    from transformers.pytorch_utils import Conv1D

    excluded = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    widths: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if module is excluded or "experts" in path.split("."):
            continue
        if isinstance(module, torch.nn.Linear):
            widths[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            widths[path] = module.nx, module.nf
    return widths
