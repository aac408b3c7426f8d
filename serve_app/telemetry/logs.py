"""Log files in TorchServe's layout or as JSON: what the server says, and what handlers say.

``ts_log.log`` has what every process of the server logs, ``model_log.log`` what handlers log, print and write
to standard error. Neither holds up an event loop or an author's code: a record is made where it belongs, for
some microseconds, and written by a thread (sink.py).
"""

from __future__ import annotations

import builtins
import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import IO, Any, Literal, TypeVar

import orjson

from serve_app.errors import ConfigurationError, RelayError
from serve_app.settings import Settings
from serve_app.telemetry.access_log import Stamp
from serve_app.telemetry.sink import Drain, File, Stream

SERVER_LOG = "ts_log.log"
MODEL_LOG = "model_log.log"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

REQUESTS: ContextVar[tuple[str, ...]] = ContextVar("requests", default=())
"""The ids of the requests whose batch runs here; the runner sets it."""

_LONGEST = 64 << 10  # characters of one record; more is cut
_CONSOLE = "%(asctime)s [%(levelname)-5s] %(name)s - %(message)s"
_LOG4J = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # what TorchServe's files call them
# Loggers whose records are not the author's: the server's own, and Ray's.
_SERVERS = ("torchrelay", "ray")


@dataclass(frozen=True)
class Speaker:
    """Whose process this is: a replica of a version, or the gateway, or Management."""

    name: str  # stands where TorchServe's layout has the thread
    model: str = ""
    version: str = ""
    replica: str = ""

    @classmethod
    def of_replica(cls, model: str, version: str, replica: str) -> Speaker:
        return cls(f"W-{replica}-{model}_{version}", model, version, replica)


class Form:
    """A record as a line (or several: a traceback has its own) of a file."""

    def __init__(self, speaker: Speaker, form: Literal["text", "json"]) -> None:
        self._speaker = speaker
        self._json = form == "json"
        self._stamp = Stamp()
        self._exceptions = logging.Formatter()

    def record(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self._exceptions.formatException(record.exc_info)
        if record.stack_info:
            message += "\n" + record.stack_info
        return self.line(record.created, record.levelname, self._speaker.name, record.name, message)

    def line(self, when: float, level: str, thread: str, logger: str, message: str) -> str:
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}… ({len(message) - _LONGEST} characters more)"
        requests = REQUESTS.get()
        stamp = self._stamp(when)
        if not self._json:
            ids = f" id={','.join(requests)}" if requests else ""
            return f"{stamp} [{_LOG4J.get(level, level):<5s}] {thread} {logger} - {message}{ids}"
        said: dict[str, Any] = {"time": stamp, "level": level, "logger": logger, "message": message}
        speaker = self._speaker
        if speaker.model:
            said |= {"model": speaker.model, "version": speaker.version, "replica": speaker.replica}
        else:
            said["process"] = speaker.name
        if requests:
            said["request_ids"] = requests
        try:
            return orjson.dumps(said).decode()
        except orjson.JSONEncodeError:  # half a character, as a file name may have
            said["message"] = message.encode(errors="backslashreplace").decode()
            return orjson.dumps(said).decode()


class _Handler(logging.Handler):
    """Sends records to a drain. Who closes a logger's handlers, as an author may, does not close the drain."""

    def __init__(self, drain: Drain, make: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._drain = drain
        self._make = make

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._drain.put(self._make(record))
        except Exception:
            self.handleError(record)


class _Authors(logging.Filter):
    """Lets through what is neither the server's nor Ray's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] not in _SERVERS


class _Tee:
    """Standard output or error: what is written goes where it went, and line by line to the model's log."""

    def __init__(self, stream: Any, say: Callable[[str], None]) -> None:
        self._stream = stream
        self._say = say
        self._halves: dict[int, str] = {}  # lines that have no end yet, by the thread that writes them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self.copy(text)
        return len(text) if written is None else written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def copy(self, text: str) -> None:
        """To the model's log alone."""
        thread = threading.get_ident()
        half = self._halves.pop(thread, "")
        *lines, rest = (half + text).split("\n")
        for line in lines:
            line = line.rstrip("\r").rpartition("\r")[2]  # a progress bar draws over itself: its last state counts
            if line.strip():
                self._say(line)
        if len(rest) > _LONGEST:
            self._say(rest)
        elif rest:
            self._halves[thread] = rest


def level_of(settings: Settings, model: str = "", own: str | None = None) -> str:
    """The level of a process's records: telemetry.log_levels, the model's ``own`` log_level, telemetry.log_level.

    Raises ConfigurationError for a level that there is not, at whatever place it stands.
    """
    said = settings.telemetry
    for where, level in (
        ("telemetry.log_level", said.log_level),
        *((f"telemetry.log_levels, {name}", level) for name, level in said.log_levels.items()),
    ):
        if level.upper() not in LEVELS:
            raise ConfigurationError(where, f"there is no level {level!r}; known here: {', '.join(LEVELS)}")
    return (said.log_levels.get(model) or own or said.log_level).upper()


class _Running:
    """What ``configure`` put in place in this process."""

    def __init__(self, settings: Settings, speaker: Speaker, level: str, stream: IO[str] | None) -> None:
        said = settings.telemetry
        self._form = Form(speaker, said.log_format)
        self._speaker = speaker
        # Not sys.stderr: in a replica that is Ray Serve's, which keeps lines back until it has many.
        console = Drain(Stream(stream or sys.__stderr__ or sys.stderr), "console", period=0.0)
        self._drains = [console, Drain(File(settings.log_dir / SERVER_LOG, said.log_bytes), SERVER_LOG)]
        self._undo: list[Callable[[], None]] = []
        self._server = logging.getLogger("torchrelay")
        self._handlers: list[logging.Handler] = [
            _Handler(self._drains[0], logging.Formatter(_CONSOLE).format),
            _Handler(self._drains[1], self._form.record),
        ]
        self._server.propagate = False
        self.mend(level)
        original = builtins.print
        if not isinstance(original, BuiltinFunctionType):
            builtins.print = _mended(original)
            self._undo.append(lambda: setattr(builtins, "print", original))
        if speaker.model:
            self._listen_to_author(Drain(File(settings.log_dir / MODEL_LOG, said.log_bytes), MODEL_LOG), level)

    def mend(self, level: str | None = None) -> None:
        for handler in self._handlers:
            if handler not in self._server.handlers:
                self._server.addHandler(handler)
        if level is not None:
            self._server.setLevel(level)
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] in ("torchrelay", "handlers"):  # also what our handlers' base classes log
                logging.getLogger(name).disabled = False

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        console, *files = self._drains
        for drain in files:
            drain.close()  # what keeps it from writing, the console still hears
        for handler in self._handlers:
            self._server.removeHandler(handler)
        self._server.propagate = True
        console.close()

    def _listen_to_author(self, drain: Drain, level: str) -> None:
        """What the author logs, prints and writes to standard error goes to ``drain`` too."""
        self._drains.append(drain)
        name, form, root = self._speaker.name, self._form, logging.getLogger()

        def says(where: str, level: str) -> Callable[[str], None]:
            return lambda line: drain.put(form.line(time.time(), level, f"{name}-{where}", "MODEL_LOG", line))

        out, err = _Tee(sys.stdout, says("stdout", "INFO")), _Tee(sys.stderr, says("stderr", "WARNING"))
        before = sys.stdout, sys.stderr, root.level
        sys.stdout, sys.stderr = out, err  # type: ignore[assignment]

        file = _Handler(drain, form.record)
        # Where no handler is set, Python shows warnings on standard error: so it stays.
        shown = logging.StreamHandler(before[1])
        shown.setLevel(logging.WARNING)
        added = [file, shown]
        for handler in added:
            handler.addFilter(_Authors())
            root.addHandler(handler)
        root.setLevel(level)

        def undo() -> None:
            sys.stdout, sys.stderr = before[:2]
            root.setLevel(before[2])
            for handler in added:
                root.removeHandler(handler)

        self._undo.append(undo)


def _mended(original: Callable[..., None]) -> Callable[..., None]:
    """Ray Serve's ``print``, which does not write to sys.stdout, and into any other file writes a tuple.

    Tracebacks are printed so: without this none could be read in a log.
    """

    def print(*objects: Any, sep: str | None = None, end: str | None = None, file: Any = None, **named: Any) -> None:
        sep, end = " " if sep is None else sep, "\n" if end is None else end
        to = sys.stdout if file is None else file
        if to is sys.stdout or to is sys.stderr:
            original(*objects, sep=sep, end=end, file=file, **named)
            if isinstance(to, _Tee):
                to.copy(sep.join(map(str, objects)) + end)
            return
        to.write(sep.join(map(str, objects)) + end)
        if named.get("flush"):
            to.flush()

    return print


Begin = TypeVar("Begin", bound=Callable[..., Awaitable[None]])


def told(begin: Begin) -> Begin:
    """What keeps a deployment from starting is told on the console: Ray Serve has it in files of its own alone."""

    @functools.wraps(begin)
    async def beginning(self: Any, *args: Any, **named: Any) -> None:
        try:
            await begin(self, *args, **named)
        except Exception as error:
            # By no logger: there may be none yet, and what is wrong may be the logs.
            why = f"{error}\n" if isinstance(error, RelayError) else traceback.format_exc()
            console = sys.__stderr__ or sys.stderr
            console.write(f"{type(self).__name__} cannot start: {why}")
            console.flush()
            raise

    return beginning  # type: ignore[return-value]


_running: _Running | None = None


def configure(
    settings: Settings, speaker: Speaker, own_level: str | None = None, stream: IO[str] | None = None
) -> None:
    """From now on what the ``torchrelay`` logger gets goes to standard error and to ``ts_log.log``.

    In a replica (``speaker`` names its model) what the author's code logs, prints and writes to standard error
    goes to ``model_log.log`` as well as where it went before. ``own_level`` is the level that the model asks for
    itself. A second call changes only the level. Raises ConfigurationError for a level that there is not.
    """
    global _running
    level = level_of(settings, speaker.model, own_level)
    if _running is not None:
        _running.mend(level)
        return
    _running = _Running(settings, speaker, level, stream)


def mend() -> None:
    """Put back what an author's ``logging.config`` has switched off of the server's own loggers."""
    if _running is not None:
        _running.mend()


def close() -> None:
    """Write what was logged so far, and log no more until ``configure`` is called again."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.close()
