"""A file of kinds: the settings and gates that `leasekit kinds apply` reads from TOML, and what they would change."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from leasekit.backend import checked
from leasekit.cli import output
from leasekit.cli.gates import Gated
from leasekit.cli.settings_text import contradictions, parsed
from leasekit.client import Client
from leasekit.errors import ConfigError, Refused
from leasekit.named import PREFIXES
from leasekit.task import GateInfo
from leasekit.wire import ChangedCollection, GateRequest, OneKind

_GATE, _COLLECTIONS = "gate", "collections"
_GATE_FORMS = "open, pause or drop, or a table of mode, reason, and until (a time with its offset)"


class KindsFile(NamedTuple):
    """The settings of kinds, and gates: None is an open one."""

    kinds: Mapping[str, Mapping[str, Any]]
    gates: Mapping[Gated, GateRequest | None]


def read(path: str) -> tuple[KindsFile, list[str]]:
    """Return what a TOML file says, and the sentences about its errors. Raises `ConfigError` if it is no TOML."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file {path!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {path!r} is not TOML: {error}") from error
    kinds: dict[str, dict[str, Any]] = {}
    gates: dict[Gated, GateRequest | None] = {}
    errors: list[str] = []
    collections = tables.pop(_COLLECTIONS, {})
    for kind, table in tables.items():
        if (fault := _fault(kind, table)) is not None:
            errors.append(f"{kind!r} {fault}")
            continue
        if _GATE in table:
            gates |= _gate(Gated(kind, None), f"[{kind}]", table.pop(_GATE), errors)
        if table or Gated(kind, None) not in gates:  # a table with a gate alone leaves the settings as they are
            kinds[kind] = _settings(kind, table, errors)
    for name, table in _collections(collections, errors):
        gates |= _gate(Gated(None, name), f"[{_COLLECTIONS}.{name}]", table, errors)
    return KindsFile(kinds, gates), [f"{path}: {error}" for error in errors]


def _fault(kind: str, table: object) -> str | None:
    """Return why this cannot be the table of a kind in a file."""
    if not isinstance(table, dict):
        return "is no table: write [KIND] above the settings of a kind"
    if kind.startswith(PREFIXES):
        return "stands for the lease of a name, which has no settings: leave it out"
    try:
        checked(OneKind, {"kind": kind})
    except Refused:
        return "is no kind: it must have 1 to 128 printable ASCII characters, and no slash"
    return None


def _settings(kind: str, table: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in table.items():
        try:
            settings[name] = parsed(name, value)
        except ConfigError as error:
            errors.append(f"[{kind}] {error}")
    errors += [f"[{kind}] {fault}" for fault in contradictions(settings)]
    return settings


def _collections(tables: object, errors: list[str]) -> Iterable[tuple[str, object]]:
    """Return the gate of each collection in the file."""
    if not isinstance(tables, dict):
        errors.append(f"{_COLLECTIONS!r} is no table: write [{_COLLECTIONS}.NAME] above the gate of a collection")
        return
    for name, table in cast("dict[str, object]", tables).items():
        where = f"[{_COLLECTIONS}.{name}]"
        if not isinstance(table, dict) or [*cast("dict[str, object]", table)] != [_GATE]:
            errors.append(f"{where} has a gate and nothing else: write gate = {_GATE_FORMS}")
            continue
        try:
            checked(ChangedCollection, {"collection": name})
        except Refused:
            errors.append(f"{where} is no name of a collection: it must have 1 to 128 printable ASCII characters")
            continue
        yield name, table[_GATE]


def _gate(what: Gated, where: str, value: object, errors: list[str]) -> dict[Gated, GateRequest | None]:
    wanted = {"mode": value} if isinstance(value, str) else value
    if wanted == {"mode": "open"}:
        return {what: None}
    try:
        if not isinstance(wanted, dict) or not {"mode"} <= wanted.keys() <= {"mode", "reason", "until"}:
            raise TypeError(value)
        return {what: checked(GateRequest, cast("dict[str, Any]", wanted))}
    except (Refused, TypeError):
        errors.append(f"{where} gate cannot be {value!r}: write {_GATE_FORMS}")
        return {what: None}


class GateChange(NamedTuple):
    """A gate that is not as a file says."""

    what: Gated
    old: GateInfo | None
    new: GateRequest | None

    def __str__(self) -> str:
        name = self.what.kind or f"collection {self.what.collection}"
        return f"{name}: gate {_shown(self.old)} → {_shown(self.new)}"


def gate_changes(
    wanted: Mapping[Gated, GateRequest | None], closed: Sequence[GateInfo], *, now: datetime | None = None
) -> list[GateChange]:
    """Return the gates that are not as a file says, those that are to be closed first."""
    now = now or datetime.now(UTC)
    old = {Gated(gate.kind, gate.collection): gate for gate in closed}
    changes: list[GateChange] = []
    for what, gate in wanted.items():
        new = None if gate is None or (gate.until is not None and gate.until <= now) else gate
        if _said(old.get(what)) != _said(new):
            changes.append(GateChange(what, old.get(what), new))
    return sorted(changes, key=lambda change: change.new is None)


def change_gate(client: Client, change: GateChange) -> None:
    """Close or open a gate as a file says."""
    kind, collection = change.what
    if change.new is None:
        client.open(kind=kind, collection=collection)
        return
    close = client.pause if change.new.mode == "pause" else client.drop
    close(kind=kind, collection=collection, until=change.new.until, reason=change.new.reason)


def _said(gate: GateInfo | GateRequest | None) -> object:
    return None if gate is None else (gate.mode, gate.until, gate.reason)


def _shown(gate: GateInfo | GateRequest | None) -> str:
    if gate is None:
        return "open"
    until = "" if gate.until is None else f" until {output.moment(gate.until)}"
    return f"{gate.mode}{until}{f' ({gate.reason})' if gate.reason else ''}"
