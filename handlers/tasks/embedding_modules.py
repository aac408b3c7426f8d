"""The modules of a folder of sentence-transformers, which follow its transformer: ``modules.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerLoadError
from handlers.tasks.encoder import read_json

SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
_ACTIVATIONS = ("GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh")  # of torch.nn


class Projection(torch.nn.Module):
    """A Dense module: a linear layer with an activation, on vectors of texts or of tokens."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], trusted: bool) -> None:
        super().__init__()
        weights = _read_weights(folder, trusted)
        name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
        residual = settings.get("use_residual") is True
        if name not in _ACTIVATIONS:
            raise HandlerLoadError(
                f"{folder}: the activation {name!r} is not served; there are {', '.join(_ACTIVATIONS)}"
            )
        try:
            sizes = weights["linear.weight"].shape[::-1]
            self.linear = torch.nn.Linear(*sizes, bias="linear.bias" in weights)
            has_residual = residual and sizes[0] != sizes[1]
            self.residual = torch.nn.Linear(*sizes, bias=False) if has_residual else None
            self.load_state_dict(weights)
        except (KeyError, TypeError, RuntimeError) as error:
            raise HandlerLoadError(
                f"{folder}: its weights are not those of a Dense module: {error}"
            ) from error
        self._adds_input = residual
        self._activation = getattr(torch.nn, name)()
        self.requires_grad_(False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        self.to(vectors.device)
        projected: torch.Tensor = self._activation(self.linear(vectors))
        if self._adds_input:
            projected = projected + (vectors if self.residual is None else self.residual(vectors))
        return projected


class EmbeddingModules:
    """The modules of a folder of which each is ``served``. Raises HandlerLoadError for others.

    ``token_layers`` precede the pooling, ``sentence_layers`` follow it.
    """

    def __init__(self, directory: Path, served: Sequence[str], trusted: bool = False) -> None:
        self.token_layers: list[Projection] = []
        self.sentence_layers: list[Projection] = []
        self.normalized: set[str] = set()  # the names of vectors
        self._folders: dict[str, Path] = {}
        for kind, folder in _list_modules(directory, served):
            self._folders[kind] = folder
            if kind not in ("Dense", "Normalize"):
                continue
            settings = read_json(folder / "config.json")
            names = [settings.get(f"module_{place}_name") or SENTENCE for place in ("input", "output")]
            if names not in ([SENTENCE, SENTENCE], [TOKENS, TOKENS]):
                raise HandlerLoadError(
                    f"{folder}: a {kind} from {names[0]} to {names[1]} is not served; both are {SENTENCE} or "
                    f"{TOKENS}"
                )
            if kind == "Normalize":
                self.normalized.add(names[0])
            elif names[0] in self.normalized:
                raise HandlerLoadError(f"{folder}: a Dense after a Normalize is not served; save it without")
            else:
                layers = self.token_layers if names[0] == TOKENS else self.sentence_layers
                layers.append(Projection(folder, settings, trusted))

    def find(self, kind: str) -> Path | None:
        """Return the folder of a module, None without one."""
        return self._folders.get(kind)


def _list_modules(directory: Path, served: Sequence[str]) -> Iterator[tuple[str, Path]]:
    modules = read_json(directory / "modules.json", [])
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise HandlerLoadError(f"{directory}: its modules.json is no list of objects; save the model again")
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in served:
            raise HandlerLoadError(
                f"{directory}: its modules.json has a {kind}, and only {', '.join(served)} are served; "
                "write a handler that runs it"
            )
        folder = directory / str(module.get("path") or "")
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise HandlerLoadError(
                f"{directory}: its modules.json names {folder}, which is not in the folder"
            )
        yield kind, folder


def _read_weights(folder: Path, trusted: bool) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if file.is_file():
            return {name: tensor.float() for name, tensor in load_file(file).items()}
        if pickled.is_file() and trusted:
            loaded = torch.load(pickled, "cpu", weights_only=True)
            return {name: tensor.float() for name, tensor in loaded.items()}
    except (SafetensorError, OSError, RuntimeError, AttributeError, ValueError) as error:
        raise HandlerLoadError(f"{folder}: its weights cannot be read: {error}") from error
    raise HandlerLoadError(
        f"{folder}: there is no {file.name}; save the model as safetensors"
        + (", or register it with trusted=true" if pickled.is_file() else "")
    )
