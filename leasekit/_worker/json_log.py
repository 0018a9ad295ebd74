"""JSON log: a line of JSON for each record, with the fields of a task where the record is about one."""

import json
import logging
from datetime import UTC, datetime

FORMAT = "json"
"""The format for which `formatter` returns a `JsonFormatter`."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""The lines of commands that log to a terminal, a file or a journal."""

_FIELDS = ("task_id", "kind", "attempt", "duration", "outcome")


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(form: str | None) -> logging.Formatter:
    return JsonFormatter(FORMAT, validate=False) if form == FORMAT else logging.Formatter(form or logging.BASIC_FORMAT)
