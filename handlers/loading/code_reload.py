"""Reloads of a model class: its source is watched, loaded beside the running one, and then served."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from handlers.errors import HandlerLoadError

logger = logging.getLogger(__name__)

_DEBOUNCE_MS = 200  # in which the writes of one edit arrive
_STEP_MS = 40
_NOT_OURS = ("site-packages", "dist-packages", "__pycache__", "node_modules")


@dataclasses.dataclass(frozen=True)
class ReloadReport:
    """The outcome of a reload: one line of the report file.

    ``revision`` identifies the change, which every replica reports.
    """

    ok: bool
    seconds: float = 0.0
    message: str = ""
    kept: list[str] = dataclasses.field(default_factory=list)
    pid: int = dataclasses.field(default_factory=os.getpid)
    time: float = dataclasses.field(default_factory=time.time)
    revision: int = 0


@dataclasses.dataclass(frozen=True)
class ReloadOptions:
    """The key ``reload`` of model-config.yaml, which ``torchrelay serve --reload`` writes.

    ``source`` is the author's file with the class, ``class_name`` empty for the default one, ``report`` the
    file that receives a line of JSON for each reload. With ``tree`` the folders below are watched, too.
    """

    source: str
    class_name: str = ""
    report: str = ""
    tree: bool = False


class CodeReloader:
    """A thread that loads the source after each change, and passes its class to ``replace``.

    Errors are reported with their line, and the class from before stays.
    """

    def __init__(
        self, options: ReloadOptions, directory: Path, replace: Callable[[type], ReloadReport]
    ) -> None:
        self._options = options
        self._directory = directory.resolve()  # of the archive, whose modules the source replaces
        self._replace = replace
        self._source = Path(options.source).resolve()
        self._thread = threading.Thread(target=self._watch, name="reload", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        from watchfiles import watch  # late: a package of ray[serve], and no other path needs it

        changes = watch(
            self._source.parent,
            watch_filter=lambda change, path: self._is_source(Path(path)),
            debounce=_DEBOUNCE_MS,
            step=_STEP_MS,
            stop_event=_WatchStart(lambda: self._report(ReloadReport(True, message="watching"))),
            recursive=self._options.tree,
            raise_interrupt=False,
        )
        for changed in changes:
            revision = max(_modification_time(path) for _, path in changed)
            self._report(dataclasses.replace(self.reload(), revision=revision))

    def reload(self) -> ReloadReport:
        """Load the source and serve its class; return the outcome."""
        try:
            return self._replace(self._load())
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            message = (
                str(error) if isinstance(error, HandlerLoadError) else describe_error(error, self._source)
            )
            return ReloadReport(False, message=message)

    def _load(self) -> type:
        from handlers.loading import loader  # late: the loader imports this module

        with _fresh_modules(self._source.parent, self._directory):
            return loader.select_model_class(
                load_source(self._source), self._source, self._options.class_name
            )

    def _is_source(self, path: Path) -> bool:
        return path.suffix == ".py" and _is_own(path, self._source.parent)

    def _report(self, report: ReloadReport) -> None:
        log = logger.info if report.ok else logger.error
        log("%s: %s", self._source, report.message or f"reloaded in {report.seconds:.3f} s")
        if self._options.report:
            line = json.dumps(dataclasses.asdict(report)) + "\n"
            with contextlib.suppress(OSError), open(self._options.report, "a") as file:
                file.write(line)


class _WatchStart:
    """A stop event that is never set; ``on_start`` is called once the file system is watched.

    ``watch`` checks it at each step. An edit before the first one would be lost.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._has_started = False

    def is_set(self) -> bool:
        if not self._has_started:
            self._has_started = True
            self._on_start()
        return False


def create_reloader(
    document: Any, directory: Path, replace: Callable[[type], ReloadReport]
) -> CodeReloader | None:
    """Return the running reloader that the key ``reload`` describes; None where the key is absent."""
    if document is None:
        return None
    if not isinstance(document, Mapping) or not isinstance(document.get("source"), str):
        raise HandlerLoadError(
            f"model-config.yaml: reload is {document!r}, and is a mapping with source. Remove it, and use "
            "`torchrelay serve --reload`."
        )
    known = {field.name for field in dataclasses.fields(ReloadOptions)}
    options = ReloadOptions(**{key: value for key, value in document.items() if key in known})
    return CodeReloader(options, directory, replace)


def load_source(file: Path) -> ModuleType:
    """Return a new module of a file, compiled from its present text; bytecode is neither read nor written."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None:
        raise HandlerLoadError(f"{file}: this is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pydantic look up the module of a class
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    return module


def describe_error(error: BaseException, file: Path) -> str:
    """Return ``file, line n: error``, where the line is the last one in ``file`` or its folder."""
    where = find_line(error, file.parent)
    return f"{where or file}: {type(error).__name__}: {getattr(error, 'msg', None) or error}"


def find_line(error: BaseException, folder: Path) -> str:
    """Return ``file, line n`` of the innermost line below ``folder``; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.lineno is not None]
    own = [frame for frame in frames if _is_own(Path(frame.filename), folder)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


@contextlib.contextmanager
def _fresh_modules(folder: Path, archive: Path) -> Iterator[None]:
    """Import the modules of ``folder`` anew, also where the archive's were imported.

    After an error the earlier ones are imported as before.
    """
    earlier = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
        and name != "__main__"
        and (_is_own(Path(file), folder) or _is_own(Path(file), archive))
    }
    for name in earlier:
        del sys.modules[name]
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.modules.update(earlier)
        raise
    finally:
        sys.dont_write_bytecode = writes_bytecode


def _modification_time(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # it was removed
        return 0


def _is_own(path: Path, folder: Path) -> bool:
    """Return whether a file is the author's: below ``folder``, and of no installed package."""
    if not path.is_relative_to(folder):
        return False
    parts = path.relative_to(folder).parts
    return not any(part.startswith(".") or part in _NOT_OURS for part in parts)
