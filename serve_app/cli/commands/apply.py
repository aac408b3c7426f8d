"""`torchrelay apply`: make a server's models agree with a file, or show the difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from handlers.tasks import ALIASES
from serve_app.cli import progress
from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, explain_error
from serve_app.cli.model_declaration import (
    Declaration,
    DeclarationError,
    DeclaredModel,
    DeclaredVersion,
    KeyPath,
    parse,
)
from serve_app.cli.store_copy import find_local, name_in_store, stored_copy
from serve_app.cli.terminal import console, errors, fail
from serve_app.client import Client, NotFoundError, ServerError, TransportError
from serve_app.domain import traffic_policy
from serve_app.domain.rollout import ACTIVE_STATES
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.domain.urls import redact_url
from serve_app.errors import RelayError
from serve_app.model_store.cache import compute_digest
from serve_app.model_store.sources import split_digest
from serve_app.settings import ModelStoreSettings

_DIFFERENT, _FAILED = 1, 2  # exit codes of --diff, as of `kubectl diff`
_INTERRUPTED = 130  # exit code after Ctrl-C
_STYLES = {"+": "green", "-": "red", "~": "yellow"}


class _Change(NamedTuple):
    """A step towards the declaration; ``path`` leads to its value in the file."""

    sign: str
    text: str
    path: KeyPath
    run: Callable[[], object]


@dataclass(frozen=True)
class _CurrentModel:
    """A model as the server has it; empty where it has none of that name."""

    versions: dict[str, dict[str, Any]]
    default: str = ""
    policy: TrafficPolicy = field(default_factory=TrafficPolicy)
    active: dict[str, Any] = field(default_factory=dict)  # the current versions, and what determines them


def apply(
    file: Annotated[str, typer.Option("--file", "-f", help="The YAML file; - is the standard input.")],
    diff: Annotated[
        bool,
        typer.Option(
            "--diff", help="Change nothing, show the difference: exit code 0 none, 1 some, 2 error."
        ),
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Unregister versions of the file's models that it does not have.")
    ] = False,
    model_store: Annotated[
        Path, typer.Option(help="The server's model store, into which a local path is copied.")
    ] = Path("model_store"),
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Register, scale and route the models of a file: its versions, workers, default versions and traffic.

    What the file does not mention stays as it is. Applied again, it changes nothing. A version with another
    archive than the file's is an error; archives of this machine are compared by their contents.
    """
    declaration = _read(file)
    folder = Path() if file == "-" else Path(file).parent
    failed = changed = False
    remaining = list(declaration.models)
    with CliClient(management, token) as client:
        for name, declared in declaration.models.items():
            model = _ModelPlan(client, name, declared, _Archives(folder, model_store), prune)
            try:
                changes = model.list_changes()
                if diff:
                    _show(name, changes)
                else:
                    _run(name, changes)
                changed = changed or bool(changes)
                remaining.remove(name)
            except KeyboardInterrupt:
                _report(f"Interrupted. Not {'compared' if diff else 'applied'}: {', '.join(remaining)}")
                raise typer.Exit(_INTERRUPTED) from None
            except _ChangeError as error:
                failed = True
                remaining.remove(name)
                for path, cause in error.problems:
                    _report(f"{declaration.place(path)}: model {name}: {_explain(cause, management)}")
                for text in error.left:
                    _report(f"model {name}: {text}")
                is_interrupted = any(isinstance(cause, _Interrupted) for _, cause in error.problems)
                if is_interrupted or any(isinstance(cause, TransportError) for _, cause in error.problems):
                    if remaining:
                        _report(f"Not {'compared' if diff else 'applied'}: {', '.join(remaining)}")
                    if is_interrupted:
                        raise typer.Exit(_INTERRUPTED) from None
                    break
    if failed:
        raise typer.Exit(_FAILED if diff else 1)
    if not changed:
        console.print("Nothing to change.")
    elif diff:
        raise typer.Exit(_DIFFERENT)


def _read(file: str) -> Declaration:
    name = "stdin" if file == "-" else file
    try:
        return parse(sys.stdin.read() if file == "-" else Path(file).read_text(), name)
    except OSError as error:
        fail(f"{name}: {error.strerror}", _FAILED)
    except (DeclarationError, UnicodeDecodeError) as error:
        fail(str(error), _FAILED)


class _ChangeError(Exception):
    """Errors of a model's changes, each with the path of its value in the file.

    ``left`` describes the changes that were not made.
    """

    def __init__(self, *problems: tuple[KeyPath, Exception], left: Sequence[str] = ()) -> None:
        super().__init__(*problems)
        self.problems = problems
        self.left = left


class _Interrupted(DeclarationError):
    """Ctrl-C during a change, whose outcome is not known here."""

    def __init__(self) -> None:
        super().__init__(
            "interrupted; the server may complete this change. `apply --diff` shows what is left"
        )


def _explain(error: Exception, management: str) -> str:
    if isinstance(error, ServerError | TransportError):
        return explain_error(error, management)
    return str(error)


def _report(message: str, style: str = "red") -> None:
    errors.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def _show(model: str, changes: list[_Change]) -> None:
    if changes:
        console.print(Text(model, style="bold"))
    for change in changes:
        console.print(Text(f"  {change.sign} {change.text}", style=_STYLES[change.sign]), soft_wrap=True)


def _run(model: str, changes: list[_Change]) -> None:
    """Make the changes of a model in their order, up to the first that fails."""
    for number, change in enumerate(changes):
        try:
            change.run()
        except (
            ServerError,
            TransportError,
            DeclarationError,
            OSError,
            typer.Exit,
            KeyboardInterrupt,
        ) as error:
            cause: Exception
            outcome = "failed"
            if isinstance(error, KeyboardInterrupt):
                cause, outcome = _Interrupted(), "interrupted"
            elif isinstance(error, typer.Exit):  # its message is printed
                cause = DeclarationError("the archive was not copied")
            else:
                cause = error
            left = [f"not done: {each.sign} {each.text}" for each in changes[number + 1 :]]
            failed = f"{outcome}: {change.sign} {change.text}"
            raise _ChangeError((change.path, cause), left=[failed, *left]) from None
        console.print(Text(f"{model}: {change.sign} {change.text}"), soft_wrap=True)


@dataclass(frozen=True)
class _Archives:
    """The local archives of a file in ``folder``, and the server's model store."""

    folder: Path
    store: Path

    def resolve(self, url: str) -> str:
        """Return a URL, whose relative path begins at the file's folder."""
        return str((self.folder / url).absolute()) if url.startswith(("./", "../")) else url

    def compute_digest(self, each: DeclaredVersion) -> str | None:
        """Return the digest of a version's archive: the declared one, else that of its contents.

        None where the archive is not on this machine. Raises RelayError and OSError where it cannot be read.
        """
        url, declared = split_digest(self.resolve(each.url))
        if declared := each.sha256 or declared:
            return declared.lower()
        path = find_local(url, self.store)
        return None if path is None else compute_digest(path, ModelStoreSettings())


class _ModelPlan:
    """The changes of one model, in an order in which each is possible and no request fails."""

    def __init__(
        self, client: Client, name: str, declared: DeclaredModel, archives: _Archives, prune: bool
    ) -> None:
        self._client = client
        self._name = name
        self._declared = declared
        self._archives = archives
        self._prune = prune
        self._path: KeyPath = ("models", name)

    def list_changes(self) -> list[_Change]:
        """Compare the file with the server. Raises _ChangeError where they cannot be made to agree."""
        try:
            current = self._read_current()
        except (ServerError, TransportError) as error:
            raise _ChangeError((self._path, error)) from None
        self._check_references(current)
        registered = {
            name: each for name, each in self._declared.versions.items() if name in current.versions
        }
        problems = [
            ((*self._path, "versions", version, key), DeclarationError(problem))
            for version, each in registered.items()
            for key, problem in self._find_differences(version, each, current.versions[version])
        ]
        if problems:
            raise _ChangeError(*problems)
        scaled = [(version, self._scale(version, current.versions[version])) for version in registered]
        changes = list(self._register(current))
        changes += [change for version, change in scaled if change and not self._shrinks(version, current)]
        routing = self._route(current)
        self._check_split(current, routing)
        changes += routing
        changes += [change for version, change in scaled if change and self._shrinks(version, current)]
        return [*changes, *self._unregister(current)]

    def _read_current(self) -> _CurrentModel:
        try:
            described = self._client.describe(self._name)
        except NotFoundError:
            return _CurrentModel({})
        versions = {each["modelVersion"]: each for each in described}
        traffic = self._client.traffic(self._name)
        default = described[0]["modelVersion"]
        active = self._read_rollout() or traffic.get("active", {})
        return _CurrentModel(versions, default, traffic_policy.read(traffic), active)

    def _read_rollout(self) -> dict[str, Any]:
        """Return an active rollout as ``active`` of the traffic, which lacks it until its first step."""
        try:
            rollout = self._client.rollout(self._name)
        except NotFoundError:
            return {}
        if rollout["state"] not in ACTIVE_STATES:
            return {}
        versions = {rollout["baseline"]: 0, rollout["to"]: 0}
        return {"by": "rollout", "id": rollout["id"], "versions": versions}

    def _check_references(self, current: _CurrentModel) -> None:
        """Raise _ChangeError for a default version or a policy that names a version which does not exist."""
        declared, pruned = self._declared, set(self._list_pruned(current))
        kept = {*declared.versions, *current.versions} - pruned
        if declared.default is not None and declared.default not in kept:
            self._refuse(f"version {declared.default} is neither in the file nor registered", "default")
        policy = declared.policy
        for version in sorted(policy.referenced_versions - kept) if policy is not None else ():
            self._refuse(f"version {version} is neither in the file nor registered", "traffic")
        if kept and declared.default is None and current.default in pruned:
            self._refuse(
                f"--prune would remove the default version {current.default}; write the new default",
                "versions",
            )
        named = current.policy.referenced_versions & pruned if policy is None else set()
        if kept and named:
            self._refuse(
                f"--prune would remove version {min(named)}, which the traffic policy names "
                f"({_format_policy(current.policy)}); write the new policy as traffic, or traffic: {{}}",
                "versions",
            )

    def _check_split(self, current: _CurrentModel, routing: list[_Change]) -> None:
        """Raise _ChangeError where an experiment or a rollout prevents a change of traffic or a removal."""
        by, id = current.active.get("by"), current.active.get("id", "")
        if by not in ("experiment", "rollout"):
            return
        needed = current.active["versions"].keys() & set(self._list_pruned(current))
        prevented = [change.text for change in routing if by == "rollout" or change.path[-1] == "traffic"]
        prevented += [f"remove version {version}" for version in sorted(needed)]
        if prevented:
            end = f"experiment stop {id}" if by == "experiment" else f"rollout abort {self._name}"
            self._refuse(
                f"the {by} {id} splits the traffic: `torchrelay {end}`, or wait for its end, before this can "
                f"be applied: {', '.join(prevented)}"
            )

    def _find_differences(
        self, version: str, each: DeclaredVersion, described: dict[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield what differs in a version and cannot be changed, with its key: its archive and its batches.

        A model-config.yaml precedes the timeouts of a registration, so that other ones are a warning only.
        """
        url = name_in_store(self._archives.resolve(each.url), self._archives.store)
        pairs = {
            "url": (redact_url(url), described["modelUrl"]),
            "handler": (each.handler, described.get("handler", "none")),
            "task": (each.task and ALIASES.get(each.task, each.task), described.get("task", "none")),
            "runtime": (each.runtime, described["runtime"]),
            "batch_size": (each.batch_size, described["batchSize"]),
            "max_batch_delay": (each.max_batch_delay, described["maxBatchDelay"]),
        }
        for key, (declared, actual) in pairs.items():
            if declared is not None and declared != actual:
                yield (
                    key,
                    f"version {version} is registered with {key} {actual}, and the file has {declared}; "
                    "declare another version, or unregister this one first",
                )
        if redact_url(url) == described["modelUrl"]:
            yield from self._compare_contents(version, each, described.get("sha256", ""))
        for key, name in (("response_timeout", "responseTimeout"), ("startup_timeout", "startupTimeout")):
            declared, actual = getattr(each, key), described[name]
            if declared is not None and declared != actual:
                _report(
                    f"Warning: model {self._name}: version {version} has {key} {actual}, and not {declared} "
                    "as in the file: its model-config.yaml or its registration has set it",
                    "yellow",
                )

    def _compare_contents(
        self, version: str, each: DeclaredVersion, registered: str
    ) -> Iterator[tuple[str, str]]:
        """Yield the difference of an archive's contents from the registered ones."""
        url = redact_url(each.url)
        try:
            digest = self._archives.compute_digest(each)
        except (RelayError, OSError) as error:
            yield "url", f"the contents of {url} cannot be compared: {error}"
            return
        if digest is None or not registered or digest == registered:
            return
        yield (
            "sha256" if each.sha256 else "url",
            f"contents changed: version {version} is registered with sha256 {registered}, and {url} "
            f"has {digest}; give the new archive a file name and a version of its own",
        )

    def _refuse(self, message: str, *keys: str) -> None:
        raise _ChangeError(((*self._path, *keys), DeclarationError(message)))

    # Versions

    def _register(self, current: _CurrentModel) -> Iterator[_Change]:
        new = [version for version in self._declared.versions if version not in current.versions]
        if not current.versions and self._declared.default in new:  # the first one becomes the default
            new.sort(key=lambda version: version != self._declared.default)
        for version in new:
            each = self._declared.versions[version]
            workers = "" if each.bounds is None else f", workers {_format_bounds(each.bounds)}"
            yield _Change(
                "+",
                f"version {version} from {redact_url(each.url)}{workers}",
                (*self._path, "versions", version),
                partial(self._register_version, version),
            )

    def _register_version(self, version: str) -> None:
        """Register a version, and scale it where its archive has other workers than the file."""
        client, name, each = self._client, self._name, self._declared.versions[version]
        before = self._list_versions()
        parameters = {"model_name": name, "synchronous": True, **each.parameters}
        with stored_copy(self._archives.resolve(each.url), self._archives.store) as url:
            if console.is_terminal:
                progress.register(client, console, url, **parameters)
            else:
                client.register(url, **parameters)
        after = self._list_versions()
        if version not in after:
            # Of this archive: another client may have registered a version meanwhile.
            added = [other for other in after.keys() - before.keys() if after[other] == redact_url(url)]
            for other in added:
                client.unregister(name, other)
            raise DeclarationError(
                f"{each.url} has version {', '.join(sorted(added))} and not {version}; correct the file"
            )
        change = self._scale(version, client.describe(name, version)[0])
        if change is not None:
            change.run()

    def _list_versions(self) -> dict[str, str]:
        """Return the URL of every version."""
        try:
            return {each["modelVersion"]: each["modelUrl"] for each in self._client.describe(self._name)}
        except NotFoundError:
            return {}

    def _scale(self, version: str, described: dict[str, Any]) -> _Change | None:
        """Return the change of a version's workers or autoscaling, where there is one."""
        each = self._declared.versions[version]
        if each.bounds is None:
            return None
        actual = described["minWorkers"], described["maxWorkers"]
        settings, scaling = each.autoscaling or {}, described.get("autoscaling", {})
        changed = {key: value for key, value in settings.items() if scaling.get(key) != value}
        if each.bounds == actual and not changed:
            return None
        texts = [f"workers {_format_bounds(actual)} → {_format_bounds(each.bounds)}"]
        texts = texts if each.bounds != actual else []
        texts += [f"{key} {scaling.get(key, '–')} → {value}" for key, value in changed.items()]
        parameters = {
            f"autoscaling_{key}" if key in ("policy", "query") else key: value
            for key, value in settings.items()
        }

        def scale() -> None:
            low, high = each.bounds or actual
            self._client.scale(
                self._name, version, min_worker=low, max_worker=high, synchronous=True, **parameters
            )

        return _Change(
            "~", f"version {version}: {', '.join(texts)}", (*self._path, "versions", version), scale
        )

    def _shrinks(self, version: str, current: _CurrentModel) -> bool:
        """Return whether a version gets fewer workers, for which its requests are moved first."""
        bounds = self._declared.versions[version].bounds
        return bounds is not None and bounds[0] < current.versions[version]["minWorkers"]

    def _list_pruned(self, current: _CurrentModel) -> list[str]:
        """Return the versions to unregister, the default one last."""
        pruned = [version for version in current.versions if version not in self._declared.versions]
        return sorted(pruned, key=lambda version: version == current.default) if self._prune else []

    def _unregister(self, current: _CurrentModel) -> Iterator[_Change]:
        """Yield the removals; before that of all versions, the policy is reset, which may name them."""
        pruned = self._list_pruned(current)
        if len(pruned) == len(current.versions) > 1 and current.policy.referenced_versions:
            yield _Change(
                "~",
                f"traffic: {_format_policy(current.policy)} → default",
                (*self._path, "versions"),
                partial(self._client.reset_traffic, self._name),
            )
        for version in pruned:
            yield _Change(
                "-",
                f"version {version}",
                (*self._path, "versions"),
                partial(self._client.unregister, self._name, version),
            )

    # Traffic

    def _route(self, current: _CurrentModel) -> list[_Change]:
        """Return the changes of default version and policy.

        A policy with shares comes first, so that no request gets the new default in between. Without shares
        the default comes first, because a policy's shadow must not be the default version.
        """
        default, policy = self._declared.default, self._declared.policy
        changes = []
        first = default or next(iter(self._declared.versions), "")
        actual = current.default or first  # the first registered version becomes the default
        if policy is not None and policy != current.policy:
            before, after = (_format_policy(each) for each in (current.policy, policy))
            changes.append(
                _Change(
                    "~",
                    f"traffic: {before} → {after}",
                    (*self._path, "traffic"),
                    lambda: self._client.set_traffic(self._name, traffic_policy.write(policy)),
                )
            )
        if default is not None and default != actual:
            change = _Change(
                "~",
                f"default version {actual} → {default}",
                (*self._path, "default"),
                partial(self._set_default, default, bool(changes)),
            )
            changes.insert(len(changes) if policy is not None and policy.versions else 0, change)
        return changes

    def _set_default(self, version: str, policy_changes: bool) -> None:
        """Make a version the default; a shadow that a later change of the policy removes is no obstacle."""
        before = traffic_policy.read(self._client.traffic(self._name))
        shadow = before.shadow
        if policy_changes and shadow is not None and shadow.version == version and not before.versions:
            without = replace(before, shadow=None, allocation=None)
            self._client.set_traffic(self._name, traffic_policy.write(without))
        self._client.set_default(self._name, version)


def _format_bounds(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} to {high}"


def _format_policy(policy: TrafficPolicy) -> str:
    document = traffic_policy.write(policy)
    kind = document.pop("policy")
    return f"{kind} {json.dumps(document)}" if document else str(kind)
