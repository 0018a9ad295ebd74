"""Instants at the ends of the calendar, in code: refused alike, whichever call has them."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import leasekit
from leasekit import sqlite
from leasekit.client import Client
from leasekit.errors import Refused
from leasekit.periodic import PeriodicTask
from leasekit.task import NewTask

ODD = [
    datetime.max.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=timezone(-timedelta(hours=23, minutes=59))),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
]


def handed_on(client: Client, at: datetime) -> None:
    client.schedule("first")
    with leasekit.lease(next(iter(client.tasks("first", until_idle=0)))) as held:
        held.then("k", at=at)


def handed_to_an_outbox(at: datetime) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        sqlite.schedule(database, NewTask(kind="k", at=at))


CALLS: dict[str, Callable[[Client, datetime], Any]] = {
    "schedule": lambda client, at: client.schedule("k", at=at),
    "then": handed_on,
    "reschedule": lambda client, at: client.reschedule("there", at=at),
    "reschedule_matching": lambda client, at: client.reschedule_matching(kind="k", at=at),
    "cancel_matching": lambda client, at: client.cancel_matching(kind="k", since=at),
    "list_dead": lambda client, at: client.list_dead(since=at),
    "redrive": lambda client, at: client.redrive(kind="k", until=at),
    "purge": lambda client, at: client.purge(kind="k", since=at),
    "pause": lambda client, at: client.pause(kind="k", until=at),
    "trigger_periodic": lambda client, at: client.trigger_periodic("p", at=at),
    "outbox": lambda _, at: handed_to_an_outbox(at),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_instant_that_some_time_zone_cannot_express_is_refused(call: str) -> None:
    with leasekit.connect("memory://") as client:
        client.schedule("k", id="there")
        client.set_periodic("p", PeriodicTask(kind="k", every=3600))
        for at in ODD:
            with pytest.raises(Refused, match=r"out of reach: give an instant from 0001-01-02T00:00:00Z to 9999-12-31"):
                CALLS[call](client, at)
