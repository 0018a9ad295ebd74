"""`connect` for URLs; `task` and `lease` for tasks that a poll loop of the user's own has received."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import leasekit
from leasekit import Lease, Task
from leasekit.errors import ConfigError
from leasekit_aws import AwsBackend, BotoClients, adopt, options
from leasekit_sfn.service import SfnService, kind_of, region_of

_FORM = "the URL of Step Functions must be sfn://activity-arn?region=…&endpoint=…&ttl=300; several ARNs: sfn://arn,arn"


def connect(url: str, *, worker: str) -> AwsBackend:
    """Return the backend for one or several activities: each is a kind, named by the last part of its ARN.

    Nothing is opened yet. `ttl` must be the `HeartbeatSeconds` of the states that run the activities, which Step
    Functions does not tell workers; default 300 s. The region is that of the ARN, unless the URL names one.

    Raises `ConfigError` if the URL is wrong.
    """
    arns, _, query = url.partition("://")[2].partition("?")
    activities: dict[str, str] = {}
    for arn in map(unquote, arns.split(",")):
        kind = kind_of(arn)
        if kind is None or "#" in query:
            raise ConfigError(_FORM)
        if activities.setdefault(kind, arn) != arn:
            raise ConfigError(f"two activities of the URL are named {kind}: connect to each by a URL of its own")
    regions = {region_of(arn) for arn in activities.values()}
    if len(regions) > 1:
        raise ConfigError("the activities of the URL are in several regions: use one URL for each region")
    found = options(query)
    service = SfnService(activities=activities, worker=worker, ttl=found.ttl)
    clients = BotoClients("stepfunctions", region=found.region or regions.pop(), endpoint=found.endpoint)
    return AwsBackend(service, clients)


def task(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, kind: str = "activity") -> Task:
    """Return the task in an answer of `client.get_activity_task`, for `with leasekit.lease(task):`.

    `client` is that boto3 client: heartbeats are sent with its credentials, region and endpoint. `ttl` must be the
    `HeartbeatSeconds` of the state, which Step Functions does not tell its workers. `kind` is the kind of the task.

    Raises `ProtocolError` if the answer has no task.
    """
    return adopt(_PLAIN.task(response, kind=kind, ttl=ttl), service=_PLAIN, name="stepfunctions", client=client)


def lease(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, idle_timeout: float | None = None) -> Lease:
    """Return `leasekit.lease(task(response, …))`, for `with lease(response, client=client, ttl=300) as held:`."""
    return leasekit.lease(task(response, client=client, ttl=ttl), idle_timeout=idle_timeout)


_PLAIN = SfnService()
