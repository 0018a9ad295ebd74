"""URLs of SWF and Step Functions."""

import asyncio
from typing import Any

import msgspec
import pytest

import leasekit
import leasekit_sfn
import leasekit_swf
from leasekit import ConfigError, Heartbeats
from leasekit.registry import open_backend
from leasekit.task import Name
from leasekit_aws import AwsBackend, BotoClients, options
from leasekit_swf.backend import task_id
from tests.adapters.aws.conftest import Aws

ARN = "arn:aws:states:eu-central-1:123456789012:activity:"


@pytest.mark.parametrize(
    "url",
    [
        "swf://media",
        "swf:///render",
        "swf://media/",
        "swf://media/a/b",
        "swf://media/a%2Fb",
        "swf://media/a:b",
        "swf://me%7Cdia/a",
        "swf://media/a%0Ab",
        "swf://media/" + "x" * 257,
        "swf://key:secret@media/render",
        "swf://media/render#part",
        "swf://media/render?regoin=eu-central-1",
        "swf://media/render?ttl=1",
        "swf://media/render?ttl=soon",
        "swf://media/render?ttl=nan",
        "swf://media/render?ttl=60&ttl=70",
        "swf://media/render?region=",
        "swf://media/render?region",
        "swf://media/render?endpoint=localhost",
        "swf://media/render?endpoint=http://",
        "swf://media/render?endpoint=http://h:99999",
        "sfn://",
        "sfn://resize",
        f"sfn://{ARN}",
        f"sfn://{ARN}re/size",
        f"sfn://{ARN}resize,",
        f"sfn://{ARN}resize,{ARN.replace('1234', '9876')}resize",
        f"sfn://{ARN}resize,{ARN.replace('central', 'west')}crop",
        f"sfn://{ARN}resize#part",
        f"sfn://{ARN}resize?ttl=60#part",
        "sfn://arn:aws:states:eu-central-1:123456789012:stateMachine:resize",
    ],
)
def test_what_is_no_url_of_the_service_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_backend(url, worker="w")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "domain", "task_list"),
    [
        ("swf://media/render", "media", "render"),
        ("swf://Media.EU/render-1?region=eu-west-1", "Media.EU", "render-1"),
        ("swf://two%20words/%C3%BCber", "two words", "über"),
    ],
)
def test_a_url_names_domain_and_task_list(url: str, domain: str, task_list: str) -> None:
    service = leasekit_swf.SwfService(domain=domain, task_list=task_list, worker="w", ttl=300)
    assert polls(leasekit_swf.connect(url, worker="w")) == service.polls


def test_a_url_names_activities_and_each_is_a_kind() -> None:
    found = polls(leasekit_sfn.connect(f"sfn://{ARN}resize,{ARN}crop-2?ttl=60", worker="w"))
    assert {kind: call.params["activityArn"] for kind, call in found.items()} == {
        "resize": ARN + "resize",
        "crop-2": ARN + "crop-2",
    }


def polls(backend: AwsBackend) -> Any:
    return backend._service.polls


@pytest.mark.anyio
async def test_the_region_of_an_activity_is_in_its_arn(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    backend = leasekit_sfn.connect(f"sfn://{ARN.replace('central', 'north')}resize?endpoint={aws.url}", worker="w")
    await backend.claim(["resize"], limit=1, wait=0, claim_id="c")
    await asyncio.to_thread(aws.wait_until, lambda: aws.signers)
    await backend.aclose()
    assert [scope.split("/")[2] for _, scope in aws.signers] == ["eu-north-1"]


def test_a_long_poll_is_waited_for_and_a_heartbeat_is_not(aws: Aws) -> None:
    """Both services poll for 60 s, which is botocore's own time-out; a beat has 10 s."""
    clients = BotoClients("swf", endpoint=aws.url)
    poll, call = (clients._client(is_poll=is_poll).meta.config for is_poll in (True, False))
    clients.close()
    assert poll.read_timeout >= 65
    assert call.read_timeout < 10
    assert poll.retries["total_max_attempts"] == call.retries["total_max_attempts"] == 1


def test_options_are_where_a_service_is_and_how_long_its_leases_last() -> None:
    found = options("region=eu-west-1&endpoint=http://127.0.0.1:4566&ttl=90.5")
    assert (found.region, found.endpoint, found.ttl) == ("eu-west-1", "http://127.0.0.1:4566", 90.5)
    assert (options("").region, options("").endpoint, options("").ttl) == (None, None, 300)


@pytest.mark.parametrize(("rate", "capacity"), [(1, 120), (10, 1200)])
def test_heartbeats_are_one_a_slot_so_capacity_is_rate_times_cycle(aws: Aws, rate: float, capacity: int) -> None:
    """120 at one a second and 120 s; nothing bursts."""
    url = f"swf://media/render?endpoint={aws.url}"
    with leasekit.connect(url, heartbeats=Heartbeats(rate=rate)) as client:
        assert client.__connection__().keeper.capacity == capacity


@pytest.mark.parametrize(
    ("parts", "plain"),
    [
        (("order-1", "run", "a"), True),
        (("order 1", "run", "a"), False),
        (("x" * 200, "run", "a"), False),
        (("ü", "run", "a/b"), False),
    ],
)
def test_an_id_names_the_activity_of_a_run_and_is_a_name(parts: tuple[str, str, str], *, plain: bool) -> None:
    made = task_id(*parts)
    assert msgspec.convert(made, Name) == made
    assert (made == ":".join(parts)) is plain
    assert made == task_id(*parts)
    assert made != task_id(*parts[:2], "another")
