"""`connect` for URLs; `task` for what a poller of the user's own has received."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import leasekit
from leasekit import Lease, Task
from leasekit.errors import ConfigError, ProtocolError
from leasekit_aws import AwsBackend, Clients, adopt, options
from leasekit_sfn.service import SfnService, kind_of, region_of

__all__ = ["connect", "lease", "task"]

_FORM = "a URL of Step Functions is sfn://activity-arn?region=…&endpoint=…&ttl=300, with several ARNs: sfn://arn,arn"


def connect(url: str, *, worker: str) -> AwsBackend:
    """The backend for one activity, or several: each is a kind, called by the last part of its ARN. Opens nothing yet.

    `ttl` has to be the `HeartbeatSeconds` of the states that run them, which Step Functions does not tell workers;
    default 300 s. The region is that of the ARN.

    Raises `ConfigError` where the URL is none of Step Functions'.
    """
    arns, _, query = url.partition("://")[2].partition("?")
    activities: dict[str, str] = {}
    for arn in map(unquote, arns.split(",")):
        kind = kind_of(arn)
        if kind is None or "#" in query:
            raise ConfigError(_FORM)
        if activities.setdefault(kind, arn) != arn:
            raise ConfigError(f"two activities of this URL are called {kind}: connect to each by itself")
    regions = {region_of(arn) for arn in activities.values()}
    if len(regions) > 1:
        raise ConfigError("the activities of this URL are in several regions: connect to each region by itself")
    found = options(query)
    service = SfnService(activities=activities, worker=worker, ttl=found.ttl)
    return AwsBackend(service, Clients("stepfunctions", region=found.region or regions.pop(), endpoint=found.endpoint))


def task(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, kind: str = "activity") -> Task:
    """The task in what `client.get_activity_task` has returned, for `with leasekit.lease(task):`.

    `client` is that boto3 client: heartbeats go out with its credentials, region and endpoint. `ttl` has to be the
    `HeartbeatSeconds` of the state, which Step Functions does not tell its workers. `kind` is what the task is called.

    Raises `ProtocolError` where there is no task in it.
    """
    found = _PLAIN.task(response, kind=kind, ttl=ttl)
    if found is None:
        raise ProtocolError("this poll has brought no task: look at its taskToken first")
    return adopt(found, service=_PLAIN, name="stepfunctions", client=client)


def lease(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, idle_timeout: float | None = None) -> Lease:
    """`leasekit.lease(task(response, …))`: for `with lease(response, client=client, ttl=300) as held:`."""
    return leasekit.lease(task(response, client=client, ttl=ttl), idle_timeout=idle_timeout)


_PLAIN = SfnService()
