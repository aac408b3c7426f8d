"""The file of `torchrelay apply`: the models that a server should have, and the line of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from handlers import untrusted_files
from serve_app.domain import autoscaling, traffic_policy, validation
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.errors import BadRequest

KeyPath = tuple[Any, ...]  # of keys, from the document's root
_BOUNDS = ("min_workers", "max_workers")


class DeclarationError(Exception):
    """A message on a value of the file, and the path that leads to it, or its line."""

    def __init__(self, message: str, path: KeyPath = (), line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


@dataclass(frozen=True)
class DeclaredVersion:
    """A version of a model. What is None is not compared, and has the server's default at a registration.

    The archive and the parameters of a registration cannot be changed later; workers and autoscaling can.
    """

    __pydantic_config__ = validation.STRICT
    url: str
    workers: int | None = None  # both bounds
    min_workers: int | None = None
    max_workers: int | None = None
    autoscaling: dict[str, Any] | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None
    response_timeout: int | None = None
    startup_timeout: int | None = None
    handler: str | None = None
    task: str | None = None
    runtime: str | None = None
    sha256: str | None = None
    trusted: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_batch_delay", "response_timeout", "startup_timeout"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; write a number from 1, or leave it out")
        given = [name for name in _BOUNDS if getattr(self, name) is not None]
        if self.workers is not None and given:
            raise ValueError(f"workers are both bounds; leave out {given[0]}, or write both of {_BOUNDS}")
        if len(given) == 1:
            raise ValueError(f"{given[0]} has no counterpart; write min_workers and max_workers, or workers")
        if (bounds := self.bounds) is not None:
            low, high = bounds
            if not 0 <= low <= high:
                raise ValueError(f"{low} to {high} workers cannot be; write 0 <= min_workers <= max_workers")
        if self.autoscaling is not None and (bounds is None or bounds[0] == bounds[1]):
            raise ValueError("autoscaling needs min_workers and max_workers, the one below the other")

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers; None where the file has none."""
        if self.workers is not None:
            return self.workers, self.workers
        if self.min_workers is None or self.max_workers is None:
            return None
        return self.min_workers, self.max_workers

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the registration, besides URL and name."""
        names = "batch_size max_batch_delay response_timeout startup_timeout handler task runtime sha256"
        workers = {} if self.bounds is None else {"initial_workers": self.bounds[0]}
        return {name: getattr(self, name) for name in names.split()} | workers | {"trusted": self.trusted}


@dataclass(frozen=True)
class DeclaredModel:
    """A model with its versions; what is None is left as it is on the server."""

    __pydantic_config__ = validation.STRICT
    versions: dict[str, DeclaredVersion]
    default: str | None = None
    traffic: dict[str, Any] | None = None

    @property
    def policy(self) -> TrafficPolicy | None:
        return None if self.traffic is None else traffic_policy.read(self.traffic)


@dataclass(frozen=True)
class Declaration:
    """The contents of a file; ``name`` is the file's, ``lines`` are those of its keys."""

    models: dict[str, DeclaredModel]
    name: str = ""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Return the file and the line of the nearest key above or at ``path``."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


@dataclass(frozen=True)
class _Document:
    __pydantic_config__ = validation.STRICT
    models: dict[str, DeclaredModel]


def parse(text: str, name: str) -> Declaration:
    """Return the declaration in a YAML text. Raises DeclarationError, whose message has the line."""
    declaration = Declaration({}, name)
    try:
        try:
            document = untrusted_files.load_yaml(text)
        except untrusted_files.YamlError as error:
            match = re.fullmatch(r"line (\d+): (.*)", str(error), re.DOTALL)
            raise (
                DeclarationError(match[2], line=int(match[1])) if match else DeclarationError(str(error))
            ) from None
        # The loader above has bounded the number of nodes and levels.
        declaration = Declaration({}, name, _list_lines(yaml.compose(text, yaml.SafeLoader)))
        models = validation.read(_Document, document).models
        for model, declared in models.items():
            _check(model, declared)
        return Declaration(models, name, declaration.lines)
    except (DeclarationError, validation.DocumentError) as error:
        line = getattr(error, "line", 0)
        place = f"{name}:{line}" if line else declaration.place(error.path)
        raise DeclarationError(f"{place}: {error}") from None


def _list_lines(root: yaml.Node | None) -> dict[KeyPath, int]:
    """Return the line of every key by its path. Raises DeclarationError for a key that is ambiguous."""
    lines: dict[KeyPath, int] = {}
    pending: list[tuple[KeyPath, yaml.Node | None]] = [((), root)]
    while pending:
        path, node = pending.pop()
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            inner = (*path, key.value)
            line = key.start_mark.line + 1
            if inner in lines:
                before = lines[inner]
                raise DeclarationError(f"{key.value!r} stands in line {before} and in line {line}", line=line)
            lines[inner] = line
            if key.tag != "tag:yaml.org,2002:str":
                raise DeclarationError(f"the key {key.value} is no text; put it in quotes", line=line)
            pending.append((inner, value))
    return lines


def _check(model: str, declared: DeclaredModel) -> None:
    """Check the values whose form other parts of the server define. Raises DeclarationError."""
    path = ("models", model)
    for version, each in declared.versions.items():
        if each.autoscaling is not None:
            _convert(
                lambda each=each: autoscaling.read(each.autoscaling), path, "versions", version, "autoscaling"
            )
    _convert(lambda: declared.policy, path, "traffic")


def _convert(read: Any, path: KeyPath, *keys: str) -> Autoscaling | TrafficPolicy | None:
    try:
        return read()
    except BadRequest as error:
        raise DeclarationError(f"model {path[1]}: {error}", (*path, *keys)) from None
