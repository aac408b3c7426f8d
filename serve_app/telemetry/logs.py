"""Log files of the server and of handlers, in TorchServe's layout or as JSON.

``ts_log.log`` has the records of every process of the server, ``model_log.log`` what handlers log, print and
write to standard error. Neither blocks an event loop or a handler: a record is formatted by its caller, in
some microseconds, and written by a thread (log_writer.py).
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
from serve_app.telemetry import tracing
from serve_app.telemetry.access_log import TimestampFormatter
from serve_app.telemetry.log_writer import AsyncWriter, FileSink, StreamSink

SERVER_LOG = "ts_log.log"
MODEL_LOG = "model_log.log"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

REQUESTS: ContextVar[tuple[str, ...]] = ContextVar("requests", default=())
"""The ids of the requests whose batch runs in this context; the runner sets it."""

_MAX_LENGTH = 64 << 10  # characters of one record; the rest is cut
_MAX_REPEATS = 200  # records of one place in the code in each period
_REPEAT_PERIOD_S = 60.0
_CONSOLE = "%(asctime)s [%(levelname)-5s] %(name)s - %(message)s"
_LOG4J = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # TorchServe's names
# Loggers whose records are not the handler's: the server's own, and Ray's.
_SERVER_LOGGERS = ("serve_app", "ray")


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of this process: a replica of a version, the gateway, or Management."""

    name: str  # in the place of the thread in TorchServe's layout
    model: str = ""
    version: str = ""
    replica: str = ""

    @classmethod
    def of_replica(cls, model: str, version: str, replica: str) -> ProcessIdentity:
        # The last underscore ends the model's name, as a reader of the log has to know.
        return cls(f"W-{replica}-{model}_{version.replace('_', '%5F')}", model, version, replica)


_thread = threading.local()


def identify_thread(identity: ProcessIdentity) -> None:
    """Let lines of the calling thread have an identity of their own: that of one version of a pool."""
    _thread.identity = identity


class LineFormatter(logging.Formatter):
    """A formatter of records as lines of a file; a traceback has several."""

    def __init__(self, identity: ProcessIdentity, form: Literal["text", "json"]) -> None:
        super().__init__()
        self._identity = identity
        self._json = form == "json"
        self._timestamp = TimestampFormatter()

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            message += "\n" + record.stack_info
        return self.line(record.created, record.levelname, self.identity.name, record.name, message)

    @property
    def identity(self) -> ProcessIdentity:
        """The identity of the calling thread, else of the process."""
        return getattr(_thread, "identity", self._identity)

    def line(self, when: float, level: str, thread: str, logger: str, message: str) -> str:
        if len(message) > _MAX_LENGTH:
            message = f"{message[:_MAX_LENGTH]}… ({len(message) - _MAX_LENGTH} characters more)"
        requests = REQUESTS.get()
        timestamp = self._timestamp(when)
        if not self._json:
            ids = f" id={','.join(requests)}" if requests else ""
            return f"{timestamp} [{_LOG4J.get(level, level):<5s}] {thread} {logger} - {message}{ids}"
        fields: dict[str, Any] = {"time": timestamp, "level": level, "logger": logger, "message": message}
        identity = self.identity
        if identity.model:
            fields |= {"model": identity.model, "version": identity.version, "replica": identity.replica}
        else:
            fields["process"] = identity.name
        if requests:
            fields["request_ids"] = requests
        if trace_id := tracing.current_trace_id():
            fields["trace_id"] = trace_id
        try:
            return orjson.dumps(fields).decode()
        except orjson.JSONEncodeError:  # an unpaired surrogate, as a file name may have
            fields["message"] = message.encode(errors="backslashreplace").decode()
            return orjson.dumps(fields).decode()


class _LogHandler(logging.Handler):
    """A logging handler that sends records to a writer.

    Closing the handler, as an author's code may do, does not close the writer.
    """

    def __init__(self, writer: AsyncWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception:
            self.handleError(record)


class RepeatLimiter(logging.Filter):
    """A filter that passes at most ``limit`` records of each place in the code in each ``period`` of seconds.

    A fault of a disk, a database or a model otherwise writes a record for each request. The last record that
    passes states the limit, the first one of the next period how many were left out. Records of the level
    DEBUG always pass. The filter may be added to several handlers: each record is counted once.
    """

    def __init__(
        self,
        limit: int = _MAX_REPEATS,
        period: float = _REPEAT_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._limit, self._period, self._clock = limit, period, clock
        self._lock = threading.Lock()  # the handlers' locks are separate
        self._windows: dict[tuple[str, int], _RepeatWindow] = {}  # by file and line: bounded by the code

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        passes: bool | None = getattr(record, "passes_limit", None)
        if passes is None:
            with self._lock:
                passes = record.passes_limit = self._count(record)
        return passes

    def _count(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        window = self._windows.setdefault((record.pathname, record.lineno), _RepeatWindow(now))
        omitted = 0
        if now - window.started_at >= self._period:
            omitted = max(0, window.count - self._limit)
            window.started_at, window.count = now, 0
        window.count += 1
        if window.count > self._limit:
            return False
        if omitted:
            record.msg = f"{record.msg} ({omitted} like it were left out before)"  # formatted by the handlers
        if window.count == self._limit:
            rest = self._period - (now - window.started_at)
            note = (
                f"({self._limit} like it within {self._period:.0f} s; others are left out for {rest:.0f} s)"
            )
            record.msg = f"{record.msg} {note}"
        return True


@dataclass
class _RepeatWindow:
    started_at: float
    count: int = 0


class _HandlerLogFilter(logging.Filter):
    """A filter that passes records of neither the server's nor Ray's loggers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] not in _SERVER_LOGGERS


class _TeeStream:
    """Standard output or error whose lines are copied to the model's log."""

    def __init__(self, stream: Any, log_line: Callable[[str], None]) -> None:
        self._stream = stream
        self._log_line = log_line
        self._incomplete: dict[int, str] = {}  # the last line without an end, by thread

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
        """Write text to the model's log only."""
        thread = threading.get_ident()
        incomplete = self._incomplete.pop(thread, "")
        *lines, rest = (incomplete + text).split("\n")
        for line in lines:
            # Of a progress bar, which overwrites itself, only the last state is logged.
            line = line.rstrip("\r").rpartition("\r")[2]
            if line.strip():
                self._log_line(line)
        if len(rest) > _MAX_LENGTH:
            self._log_line(rest)
        elif rest:
            self._incomplete[thread] = rest


def level_of(settings: Settings, model: str = "", own: str | None = None) -> str:
    """Return the level of a process's records.

    The first of telemetry.log_levels, the model's ``own`` log_level and telemetry.log_level holds. Raises
    ConfigurationError for an unknown level in any setting.
    """
    telemetry = settings.telemetry
    for where, level in (
        ("telemetry.log_level", telemetry.log_level),
        *((f"telemetry.log_levels, {name}", level) for name, level in telemetry.log_levels.items()),
    ):
        if level.upper() not in LEVELS:
            raise ConfigurationError(where, f"unknown level {level!r}; known levels: {', '.join(LEVELS)}")
    return (telemetry.log_levels.get(model) or own or telemetry.log_level).upper()


class _LoggingState:
    """The handlers, writers and streams that ``configure`` installed in this process."""

    def __init__(
        self, settings: Settings, identity: ProcessIdentity, level: str, stream: IO[str] | None
    ) -> None:
        telemetry = settings.telemetry
        self._formatter = LineFormatter(identity, telemetry.log_format)
        self._identity = identity
        # Not sys.stderr: in a replica that is Ray Serve's stream, which buffers many lines.
        console = AsyncWriter(StreamSink(stream or sys.__stderr__ or sys.stderr), "console", period=0.0)
        file = AsyncWriter(
            FileSink(settings.log_dir / SERVER_LOG, telemetry.log_bytes, settings.log_file_mode), SERVER_LOG
        )
        self._writers = [console, file]
        self._undo: list[Callable[[], None]] = []
        self._server = logging.getLogger("serve_app")
        self._handlers: list[logging.Handler] = [
            _LogHandler(console, logging.Formatter(_CONSOLE)),
            _LogHandler(file, self._formatter),
        ]
        limiter = RepeatLimiter()
        for handler in self._handlers:
            handler.addFilter(limiter)
        self._server.propagate = False
        self.restore(level)
        original = builtins.print
        if not isinstance(original, BuiltinFunctionType):
            builtins.print = _standard_print(original)
            self._undo.append(lambda: setattr(builtins, "print", original))
        if identity.model:
            self._copy_handler_output(
                AsyncWriter(
                    FileSink(settings.log_dir / MODEL_LOG, telemetry.log_bytes, settings.log_file_mode),
                    MODEL_LOG,
                ),
                level,
            )

    def restore(self, level: str | None = None) -> None:
        for handler in self._handlers:
            if handler not in self._server.handlers:
                self._server.addHandler(handler)
        if level is not None:
            self._server.setLevel(level)
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] in ("serve_app", "handlers"):
                logging.getLogger(name).disabled = False

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        console, *files = self._writers
        for writer in files:
            writer.close()  # failures to write are still logged to the console
        for handler in self._handlers:
            self._server.removeHandler(handler)
        self._server.propagate = True
        console.close()

    def _copy_handler_output(self, writer: AsyncWriter, level: str) -> None:
        """Copy what the handler logs, prints and writes to standard error to ``writer``."""
        self._writers.append(writer)
        formatter, root = self._formatter, logging.getLogger()

        def line_logger(stream: str, level: str) -> Callable[[str], None]:
            return lambda line: writer.put(
                formatter.line(time.time(), level, f"{formatter.identity.name}-{stream}", "MODEL_LOG", line)
            )

        before = sys.stdout, sys.stderr, root.level
        sys.stdout = _TeeStream(sys.stdout, line_logger("stdout", "INFO"))
        sys.stderr = _TeeStream(sys.stderr, line_logger("stderr", "WARNING"))

        file_handler = _LogHandler(writer, formatter)
        # Without a handler, Python prints warnings to standard error; this handler keeps that.
        console_handler = logging.StreamHandler(before[1])
        console_handler.setLevel(logging.WARNING)
        added = [file_handler, console_handler]
        for handler in added:
            handler.addFilter(_HandlerLogFilter())
            root.addHandler(handler)
        root.setLevel(level)

        def undo() -> None:
            sys.stdout, sys.stderr = before[:2]
            root.setLevel(before[2])
            for handler in added:
                root.removeHandler(handler)

        self._undo.append(undo)


def _standard_print(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for Ray Serve's ``print`` with the behaviour of the built-in.

    Ray Serve's does not write to sys.stdout and writes a tuple to any other file, which makes tracebacks in a
    log unreadable.
    """

    def print(
        *objects: Any, sep: str | None = None, end: str | None = None, file: Any = None, **options: Any
    ) -> None:
        sep, end = " " if sep is None else sep, "\n" if end is None else end
        to = sys.stdout if file is None else file
        if to is sys.stdout or to is sys.stderr:
            original(*objects, sep=sep, end=end, file=file, **options)
            if isinstance(to, _TeeStream):
                to.copy(sep.join(map(str, objects)) + end)
            return
        to.write(sep.join(map(str, objects)) + end)
        if options.get("flush"):
            to.flush()

    return print


Start = TypeVar("Start", bound=Callable[..., Awaitable[None]])


def report_start_failure(start: Start) -> Start:
    """Decorate a deployment's start to print its error on the console, not only into Ray Serve's files."""

    @functools.wraps(start)
    async def wrapper(self: Any, *args: Any, **options: Any) -> None:
        try:
            await start(self, *args, **options)
        except Exception as error:
            # Without a logger: none may be configured yet, and the logs may be the problem.
            message = f"{error}\n" if isinstance(error, RelayError) else traceback.format_exc()
            console = sys.__stderr__ or sys.stderr
            console.write(f"{type(self).__name__} cannot start: {message}")
            console.flush()
            raise

    return wrapper  # type: ignore[return-value]


_running: _LoggingState | None = None


def configure(
    settings: Settings, identity: ProcessIdentity, own_level: str | None = None, stream: IO[str] | None = None
) -> None:
    """Write the records of the ``serve_app`` loggers to standard error and to ``ts_log.log``.

    In a replica (``identity`` has its model) what the handler logs, prints and writes to standard error is
    copied to ``model_log.log``. ``own_level`` is the level in the model's configuration. A second call
    changes only the level. Raises ConfigurationError for an unknown level.
    """
    global _running
    level = level_of(settings, identity.model, own_level)
    if _running is not None:
        _running.restore(level)
        return
    _running = _LoggingState(settings, identity, level, stream)


def restore_loggers() -> None:
    """Enable the server's own loggers again, which a handler's ``logging.config`` may have disabled."""
    if _running is not None:
        _running.restore()


def close() -> None:
    """Write all records, and remove the handlers until ``configure`` is called again."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.close()
