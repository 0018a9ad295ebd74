"""`connect` for URLs; `task` and `lease` for tasks that a poll loop of the user's own has received."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import leasekit
from leasekit import Lease, Task
from leasekit.errors import ConfigError
from leasekit_aws import AwsBackend, BotoClients, adopt, options
from leasekit_swf.service import SwfService

_FORM = "the URL of SWF must be swf://domain/task-list?region=…&endpoint=…&ttl=300"


def connect(url: str, *, worker: str) -> AwsBackend:
    """Return the backend for one task list of a domain. Nothing is opened yet.

    `ttl` must be the heartbeat timeout of the activities, which SWF does not tell their workers; default 300 s.

    Raises `ConfigError` if the URL is wrong.
    """
    parts = urlsplit(url)
    domain, task_list = unquote(parts.netloc), unquote(parts.path.removeprefix("/"))
    if "@" in parts.netloc:
        raise ConfigError("leave credentials out of the URL: boto3 finds them (environment, ~/.aws, instance role)")
    if parts.fragment or not (_is_name(domain) and _is_name(task_list)):
        raise ConfigError(_FORM)
    found = options(parts.query)
    service = SwfService(domain=domain, task_list=task_list, worker=worker, ttl=found.ttl)
    return AwsBackend(service, BotoClients("swf", region=found.region, endpoint=found.endpoint))


def task(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0) -> Task:
    """Return the task in an answer of `client.poll_for_activity_task`, for `with leasekit.lease(task):`.

    `client` is that boto3 client: heartbeats are sent with its credentials, region and endpoint. `ttl` must be the
    heartbeat timeout of the activity, which SWF does not tell its workers.

    Raises `ProtocolError` if the answer has no task.
    """
    return adopt(_PLAIN.task(response, ttl=ttl), service=_PLAIN, name="swf", client=client)


def lease(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, idle_timeout: float | None = None) -> Lease:
    """Return `leasekit.lease(task(response, …))`, for `with lease(response, client=client, ttl=300) as held:`."""
    return leasekit.lease(task(response, client=client, ttl=ttl), idle_timeout=idle_timeout)


_PLAIN = SwfService()


def _is_name(name: str) -> bool:
    """Return whether SWF allows a name: 1-256 characters without `:`, `/`, `|` and control characters."""
    return 0 < len(name) <= 256 and not any(sign in ":/|" or not sign.isprintable() for sign in name)
