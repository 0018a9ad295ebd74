"""URLs of queues of due tasks, and the names of these queues in SQS."""

import re

import pytest

from leasekit.errors import ConfigError
from leasekit.queues import QueueName
from leasekit.registry import open_queues
from leasekit_sqs.queue_names import QueuesAddress, address
from leasekit_sqs.task_queues import SqsQueues

JOBS = QueuesAddress(template="jobs-{kind}-{priority}")


def test_a_url_says_which_queues_and_where() -> None:
    url = "sqs://jobs-{kind}-{priority}?region=eu-west-1&endpoint=http://localhost:1&account=123456789012&wait=20"
    assert address(url) == QueuesAddress(
        template=JOBS.template, region="eu-west-1", endpoint="http://localhost:1", account="123456789012", wait=20
    )


def test_the_registry_knows_these_queues() -> None:
    assert isinstance(open_queues("sqs://jobs-{kind}-{priority}"), SqsQueues)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqs://jobs-{kind}", "{priority} once"),
        ("sqs://jobs", "{kind} once"),
        ("sqs://{kind}-{kind}-{priority}", "{kind} once"),
        ("sqs://{kind}-{priority}.fifo", "must be standard queues"),
        ("sqs://a.b-{kind}-{priority}", "SQS does not take this name"),
        ("sqs://{kind}-{priority}/path", "must be sqs://"),
        ("sqs://{kind}-{priority}?ttl=60", "unknown option 'ttl'"),
        ("sqs://{kind}-{priority}?wait=0", "wait must be"),
        ("sqs://{kind}-{priority}?account=me", "12 digits"),
    ],
)
def test_what_names_no_queues_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        address(url)


def test_a_kind_that_sqs_can_name_is_in_the_name_of_its_queue() -> None:
    assert JOBS.name_of(QueueName("thumbnail", 2)) == "jobs-thumbnail-2"


@pytest.mark.parametrize("kind", ["a b", "mail.send", "{priority}", "k" * 128])
def test_other_kinds_are_named_by_a_digest(kind: str) -> None:
    name = JOBS.name_of(QueueName(kind, 0))
    assert re.fullmatch(r"jobs-[\w-]+_[0-9a-f]{16}-0", name)
    assert len(name) <= 80


def test_kinds_that_differ_in_one_character_have_different_queues() -> None:
    assert len({JOBS.name_of(QueueName(kind, 2)) for kind in ("a b", "a.b", "a-b", "k" * 127, "k" * 128)}) == 5
