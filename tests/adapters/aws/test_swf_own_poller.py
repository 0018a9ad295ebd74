"""`leasekit_swf.task`: what a poller of the user's own has received, kept by leasekit."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from types_boto3_swf import SWFClient

import leasekit
import leasekit_swf
from leasekit import ConfigError, LeaseLost, ProtocolError
from leasekit._binding import reserve_of
from leasekit_aws import close_all
from tests.adapters.aws.conftest import Aws


@pytest.fixture
def swf(aws: Aws) -> Iterator[SWFClient]:
    client = boto3.client("swf", endpoint_url=aws.url)
    yield client
    close_all()
    client.close()


def polled(swf: SWFClient) -> Any:
    return swf.poll_for_activity_task(domain="media", taskList={"name": "render"}, identity="mine")


def test_its_block_beats_and_completes_it(aws: Aws, swf: SWFClient) -> None:
    work = aws.schedule("render", "resize", {"page": 7})
    with leasekit.lease(leasekit_swf.task(polled(swf), client=swf, ttl=300)) as held:
        assert (held.task.kind, held.task.payload, held.fence) == ("resize", {"page": 7}, work.fence)
        assert aws.asked("RecordActivityTaskHeartbeat")
        held.complete({"ok": True})
    assert work.end == {"result": '{"ok":true}'}


def test_an_exception_fails_it_as_retriable_with_the_error(aws: Aws, swf: SWFClient) -> None:
    work = aws.schedule("render", "resize")
    with pytest.raises(ZeroDivisionError), leasekit.lease(leasekit_swf.task(polled(swf), client=swf)):
        _ = 1 / 0
    assert work.end["reason"] == "retry"
    assert '"type":"ZeroDivisionError"' in work.end["details"]


def test_a_task_that_timed_out_meanwhile_never_begins(aws: Aws, swf: SWFClient) -> None:
    aws.schedule("render", "resize")
    task = leasekit_swf.task(polled(swf), client=swf)
    aws.turn(301)
    with pytest.raises(LeaseLost, match="was over before its block began"), leasekit.lease(task):
        pytest.fail("its body ran")


@pytest.mark.parametrize("ttl", [math.nan, math.inf, 1, "300"], ids=repr)
def test_a_ttl_that_is_no_number_is_refused_where_it_is_given(aws: Aws, swf: SWFClient, ttl: Any) -> None:
    match = "ttl must be a number of seconds from 2 to 31,536,000, got"
    aws.schedule("render", "resize")
    with pytest.raises(ConfigError, match=match):
        leasekit_swf.task(polled(swf), client=swf, ttl=ttl)


def test_a_poll_that_brought_nothing_is_no_task(swf: SWFClient) -> None:
    with pytest.raises(ProtocolError, match="no task"):
        leasekit_swf.task(polled(swf), client=swf)


def test_progress_above_what_swf_takes_is_refused_where_it_is_said(aws: Aws, swf: SWFClient) -> None:
    work = aws.schedule("render", "resize")
    with leasekit.lease(leasekit_swf.task(polled(swf), client=swf)) as held:
        held.progress("x" * 2046)
        with pytest.raises(ValueError, match="2,049 bytes: 2,048 at most"):
            held.progress("x" * 2047)
    assert work.state == "ended"


def test_clients_that_sign_alike_share_one_keeper(aws: Aws, swf: SWFClient) -> None:
    aws.schedule("render", "resize")
    aws.schedule("render", "resize")
    first = leasekit_swf.task(polled(swf), client=swf)
    other = boto3.client("swf", endpoint_url=aws.url)
    second = leasekit_swf.task(polled(other), client=other)
    other.close()
    assert reserve_of(first) == reserve_of(second)


def test_clients_with_other_credentials_have_a_keeper_of_their_own(aws: Aws, swf: SWFClient) -> None:
    aws.schedule("render", "resize")
    aws.schedule("render", "resize")
    first = leasekit_swf.task(polled(swf), client=swf)
    other = boto3.client("swf", endpoint_url=aws.url, aws_access_key_id="AKIAOTHER", aws_secret_access_key="x")
    second = leasekit_swf.task(polled(other), client=other)
    other.close()
    assert reserve_of(first) != reserve_of(second)


def test_heartbeats_are_signed_with_the_credentials_of_the_users_client(aws: Aws) -> None:
    own = boto3.client("swf", endpoint_url=aws.url, aws_access_key_id="AKIAMINE", aws_secret_access_key="x")
    aws.schedule("render", "resize")
    with leasekit.lease(leasekit_swf.task(polled(own), client=own)):
        pass
    close_all()
    own.close()
    assert {scope.partition("/")[0] for _, scope in aws.signers} == {"AKIAMINE"}


def test_closing_all_ends_the_keepers(aws: Aws, swf: SWFClient) -> None:
    aws.schedule("render", "resize")
    with leasekit.lease(leasekit_swf.task(polled(swf), client=swf)):
        pass
    close_all()
    gc.collect()
    aws.schedule("render", "resize")
    with leasekit.lease(leasekit_swf.task(polled(swf), client=swf)):  # and a later task gets a new one
        pass
    assert [work.state for work in aws.works] == ["ended", "ended"]
