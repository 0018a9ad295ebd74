"""`leasekit_sfn.task`: what a poller of the user's own has received, kept by leasekit."""

import math
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from types_boto3_stepfunctions import SFNClient

import leasekit
import leasekit_sfn
from leasekit import ConfigError, Fatal, LeaseLost, ProtocolError
from leasekit_aws import close_all
from tests.adapters.aws.conftest import Aws

ARN = "arn:aws:states:eu-central-1:123456789012:activity:resize"


@pytest.fixture
def sfn(aws: Aws) -> Iterator[SFNClient]:
    client = boto3.client("stepfunctions", endpoint_url=aws.url)
    yield client
    close_all()
    client.close()


def polled(sfn: SFNClient) -> Any:
    return sfn.get_activity_task(activityArn=ARN, workerName="mine")


def test_its_block_beats_and_completes_it(aws: Aws, sfn: SFNClient) -> None:
    work = aws.schedule(ARN, "resize", {"page": 7})
    with leasekit.lease(leasekit_sfn.task(polled(sfn), client=sfn, ttl=60)) as held:
        assert (held.task.kind, held.task.payload, held.fence) == ("activity", {"page": 7}, 0)
        assert aws.asked("SendTaskHeartbeat")
        held.progress("as much as elsewhere: it stays here" * 100)
        held.complete({"ok": True})
    assert work.end == {"output": '{"ok":true}'}


def test_a_fatal_failure_is_an_error_by_that_name(aws: Aws, sfn: SFNClient) -> None:
    work = aws.schedule(ARN, "resize")
    with pytest.raises(Fatal), leasekit.lease(leasekit_sfn.task(polled(sfn), client=sfn, kind="resize")):
        raise Fatal("no such picture")
    assert work.end["error"] == "fatal"
    assert '"message":"no such picture"' in work.end["cause"]


def test_a_task_that_timed_out_meanwhile_never_begins(aws: Aws, sfn: SFNClient) -> None:
    aws.schedule(ARN, "resize")
    task = leasekit_sfn.task(polled(sfn), client=sfn)
    aws.turn(301)
    with pytest.raises(LeaseLost, match="was over before its block began"), leasekit.lease(task):
        pytest.fail("its body ran")


@pytest.mark.parametrize("ttl", [math.nan, math.inf, 1, "300"], ids=repr)
def test_a_ttl_that_is_no_number_is_refused_where_it_is_given(aws: Aws, sfn: SFNClient, ttl: Any) -> None:
    match = "ttl must be a number of seconds from 2 to 31,536,000, got"
    aws.schedule(ARN, "resize")
    with pytest.raises(ConfigError, match=match):
        leasekit_sfn.task(polled(sfn), client=sfn, ttl=ttl)


def test_a_poll_that_brought_nothing_is_no_task(sfn: SFNClient) -> None:
    with pytest.raises(ProtocolError, match="no task"):
        leasekit_sfn.task(polled(sfn), client=sfn)


def test_an_id_does_not_tell_the_token(aws: Aws, sfn: SFNClient) -> None:
    work = aws.schedule(ARN, "resize")
    task = leasekit_sfn.task(polled(sfn), client=sfn)
    assert task.id == leasekit_sfn.backend.task_id(work.token)
    assert work.token[:12] not in task.id
