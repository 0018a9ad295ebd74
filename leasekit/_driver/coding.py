"""Coding: what the codecs of one client do with users' values, on their way out and in.

Rule 1: this is the only module that calls a codec. It is called in the threads of the code that writes or reads.
Rule 2: null stays null, and a value that is encoded already stays as it is.
"""

import base64
import copy
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Raw
from msgspec.structs import force_setattr, replace

from leasekit.codecs import Codec, Encoded
from leasekit.errors import CannotDecode
from leasekit.periodic import PeriodicInfo
from leasekit.task import HistoryEntry, Page, Task, TaskInfo
from leasekit.wire import decode_value

T = TypeVar("T")

_NULL = b"null"
_IN_TASK = ("payload", "progress")
_NOTHING: dict[str, Encoded | None] = dict.fromkeys(_IN_TASK)


class Coding:
    """The codecs of one client: the first encodes, and each decodes what it has encoded. Any thread."""

    def __init__(self, codecs: Sequence[Codec] = ()) -> None:
        self._first = codecs[0] if codecs else None
        self._by_name = {codec.name: codec for codec in codecs}

    def encoded(self, clear: Raw, *, known_as: str | None = None) -> Raw:
        """Return the encoded form of a value that is JSON; without a codec the value itself.

        `known_as`: of a payload, the id of its task, so that the digests of equal payloads of two tasks differ.
        """
        codec, value = self._first, bytes(clear)
        if codec is None or value == _NULL:
            return clear
        data = base64.b64encode(codec.encode(value)).decode()
        digest = None if known_as is None else _digest(codec.digest_key, known_as, value)
        return Raw(msgspec.json.encode(Encoded(codec=codec.name, data=data, digest=digest)))

    def error(self, error: Raw) -> Raw:
        """Return an error with its text encoded, if the codec is for errors too; its type stays readable."""
        codec = self._first
        if codec is None or not codec.errors or bytes(error) == _NULL:
            return error
        told: dict[str, Any] = {"message": f"(encoded with {codec.name})"}
        match decode_value(error):
            case {"type": str(type_)}:
                told = {"type": type_, **told}
            case _:
                pass
        try:
            told["encoded"] = self.encoded(error)
        except Exception as failed:  # noqa: BLE001 - the task must be settled all the same
            told["message"] = f"(codec {codec.name} could not encode it: {type(failed).__qualname__})"
        return Raw(msgspec.json.encode(told))

    def open(self, task: Task) -> Task:
        """Return a claimed task as its code sees it. Raises `CannotDecode`.

        The task itself, if nothing in it is encoded: else a copy, and hooks go on to see what was claimed.
        """
        forms = {"payload": Encoded.of(task.payload), "progress": Encoded.of(task.progress)}
        if forms == _NOTHING or vars(task).get("is_open"):
            return task
        clear = copy.copy(task)
        vars(clear).update(vars(task), is_open=True)
        for name, form in forms.items():
            if form is not None:
                force_setattr(clear, name, self._decoded(form, f"the {name} of task {task.id} ({task.kind})"))
        return clear

    def open_here(self, task: Task) -> None:
        """Do what `open` does to the task itself, of which its code has the only reference."""
        opened = self.open(task)
        for name in _IN_TASK if opened is not task else ():
            force_setattr(task, name, getattr(opened, name))
            vars(task)["is_open"] = True

    def clear(self, value: Any, what: str) -> Any:
        """Return a value of a task as it was written; `what` names it. Raises `CannotDecode`."""
        form = Encoded.of(value)
        return value if form is None else self._decoded(form, what)

    def shown(self, answer: T) -> T:
        """Return the answer to a reader, with decoded values; what cannot be decoded is an `Encoded`."""
        shown: Any = answer
        match answer:
            case TaskInfo():
                shown = self._info(answer)
            case Page(tasks=tasks):
                shown = replace(answer, tasks=[self._info(info) for info in tasks])
            case PeriodicInfo(task=task):
                shown = replace(answer, task=replace(task, payload=self._value(task.payload)))
            case list():
                shown = [self.shown(one) for one in cast("list[Any]", answer)]
            case _:
                pass
        return cast("T", shown)

    def _info(self, info: TaskInfo) -> TaskInfo:
        values = {name: self._value(getattr(info, name)) for name in ("payload", "progress", "result")}
        history = [self._run(run) for run in info.history]
        return replace(info, **values, error=self._error(info.error), history=history)

    def _run(self, run: HistoryEntry) -> HistoryEntry:
        return replace(run, result=self._value(run.result), error=self._error(run.error))

    def _error(self, error: Any) -> Any:
        if not isinstance(error, dict) or (form := Encoded.of(cast("Any", error).get("encoded"))) is None:
            return cast("Any", error)
        value = self._value(form)
        return cast("Any", error) if isinstance(value, Encoded) else value

    def _value(self, value: Any) -> Any:
        if (form := Encoded.of(value)) is None:
            return value
        try:
            return self._decoded(form, "this value")
        except CannotDecode:
            return form

    def _decoded(self, form: Encoded, what: str) -> Any:
        name = form.codec
        if (codec := self._by_name.get(name)) is None:
            raise CannotDecode(
                f"{what} is encoded with {name!r}, and this client has no codec of that name: give it one, codec=…",
                codec=name,
            )
        try:
            return decode_value(codec.decode(base64.b64decode(form.data, validate=True)))
        except Exception as error:
            raise CannotDecode(
                f"{what} cannot be decoded with {name!r} ({type(error).__qualname__}: {error}): it is damaged, or was "
                "encoded with another key of that name",
                codec=name,
                has_codec=True,
            ) from error


CLEAR = Coding()
"""The coding of a client without codecs."""


def _digest(key: bytes, known_as: str, clear: bytes) -> str:
    # Sorted keys: the same JSON may be written in more than one way.
    canonical = msgspec.json.encode(decode_value(clear), order="sorted")
    return blake2b(known_as.encode() + b"\0" + canonical, key=key, digest_size=16).hexdigest()
