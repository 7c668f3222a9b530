"""Structured logging: one line per event on standard error, as JSON or for a terminal.

Standard output is reserved for the line with the server's address. Records of libraries that use `logging` (aiohttp,
botocore) have the same format. Callers log fields instead of sentences that contain values, so that secrets can be
recognised by the names of their fields.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import structlog

from seamark.formats.protocol.wire import encode_json
from seamark.metaserver.settings.settings import Settings


def configure_logging(settings: Settings, worker: int | None = None) -> None:
    """Configure logging, once per process.

    `worker` is the number of the worker, which each line contains if there are several workers.
    """
    writes_console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared_processors: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if worker is not None:
        shared_processors.append(_add_worker(worker))
    rendering_processors: list[Any]
    if writes_console:
        # Write plain tracebacks. The default shows local variables, which may be keys and tokens.
        format_plain = structlog.dev.plain_traceback
        rendering_processors = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=format_plain),
            _encode_line,
        ]
    else:
        rendering_processors = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_serialize_event),
        ]
    structlog.configure(
        processors=[*shared_processors, *rendering_processors],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_LineWriter,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Bridge()]
    root.setLevel(max(level, logging.WARNING))  # Libraries log only warnings and errors.


_STANDARD_ERROR = 2


class _LineWriter:
    """Writes each line at once, without a buffer.

    A line that cannot be written, for example because of a full disk or a closed pipe, is lost, because logging must
    not make a request fail.
    """

    def __init__(self, *_: Any) -> None:
        pass

    def msg(self, line: bytes) -> None:
        unwritten = memoryview(line + b"\n")
        with suppress(OSError):
            while unwritten:
                unwritten = unwritten[os.write(_STANDARD_ERROR, unwritten) :]

    log = debug = info = warning = error = critical = exception = msg


def _encode_line(logger: Any, method: str, line: str) -> bytes:
    return line.encode(errors="backslashreplace")


def _add_worker(worker: int) -> Any:
    """Return a processor that adds the number of the worker to each event."""

    def add_number(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["worker"] = worker
        return event

    return add_number


def _serialize_event(event: dict[str, Any], **_: Any) -> bytes:
    """Return an event as JSON."""
    try:
        return encode_json(event, enc_hook=str)
    except (UnicodeEncodeError, RecursionError):
        # The text contains half of a surrogate pair, or the event is nested too deeply. Logging must not make a request
        # fail.
        return encode_json({name: repr(value)[:_REPR_MAX] for name, value in event.items()})


_REPR_MAX = 1000
_QUOTING_LOGGERS = ("aiohttp", "asyncio")
"""The loggers whose exceptions may quote requests."""


class _Bridge(logging.Handler):
    """Forwards `logging` records to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record of the standard library to structlog."""
        log = structlog.get_logger(record.name)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.split(".")[0] in _QUOTING_LOGGERS:
            # Log only the frames and the type of the exception, because its message may quote the request.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.log(record.levelno, _read_first_line(record), error=type(error).__name__, at=frames)
            return
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def _read_first_line(record: logging.LogRecord) -> str:
    """Return the first line of a record.

    The other lines may contain the text of an exception.
    """
    return record.getMessage().partition("\n")[0]
