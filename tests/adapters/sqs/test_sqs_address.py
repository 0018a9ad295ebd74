"""URLs: what they say, and what is refused without repeating it."""

import pytest

from leasekit import ConfigError, connect
from leasekit.registry import open_backend
from leasekit_sqs import Address, SqsBackend
from leasekit_sqs.address import address


def test_a_url_names_a_queue() -> None:
    assert address("sqs://Thumbnails_1") == Address(queue="Thumbnails_1")


def test_a_url_says_where_and_how() -> None:
    url = (
        "sqs://q.fifo?region=eu-west-1&endpoint=http://localhost:1&account=123456789012&kind=a&kind_attribute=type"
        "&retry=45&ttl=60&wait=20"
    )
    assert address(url) == Address(
        queue="q.fifo", region="eu-west-1", endpoint="http://localhost:1", account="123456789012", kind="a",
        kind_attribute="type", retry=45, ttl=60, wait=20,
    )  # fmt: skip


@pytest.mark.parametrize("url", ["sqs://jobs-{kind}", "sqs://jobs-%7Bkind%7D"])
def test_a_template_names_a_queue_for_each_kind(url: str) -> None:
    found = address(url)
    assert found.is_template
    assert found.queue_of("thumbnail") == "jobs-thumbnail"


def test_the_registry_knows_it() -> None:
    assert isinstance(open_backend("sqs://q", worker="w"), SqsBackend)


@pytest.mark.parametrize(
    "url",
    [
        "sqs://",
        "sqs://a/b",
        "sqs://no.dots",
        "sqs://" + "x" * 81,
        "sqs://user:canary@host",
        "sqs://{kind}-{kind}",
        "sqs://q?ttl=1",
        "sqs://q?ttl=43201",
        "sqs://q?ttl=2.5",
        "sqs://q?ttl=canary",
        "sqs://q?wait=21",
        "sqs://q?wait=-1",
        "sqs://q?account=12",
        "sqs://q?endpoint=canary",
        "sqs://q?colour=canary",
        "sqs://q?region=",
        "sqs://q?kind=a&kind=b",
        "sqs://{kind}?kind=a",
        "sqs://{kind}?kind_attribute=a",
        "sqs://q#canary",
    ],
)
def test_what_makes_no_sense_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        connect(url)
    assert "canary" not in str(refusal.value)


@pytest.mark.parametrize("ttl", ["canary", "nan", "inf", "-5", "1e3", "1_000", "31536001", "999999999999"])
def test_a_wrong_ttl_is_refused_with_its_name_and_bounds(ttl: str) -> None:
    with pytest.raises(ConfigError, match="ttl in the URL must be a number of seconds from 2 to 31,536,000"):
        connect(f"sqs://q?ttl={ttl}")


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("kind=", "the option 'kind' of the URL is empty"),
        ("kind=a&kind=b", "the option 'kind' of the URL is given twice"),
        ("kind=%C3%A4", "kind in the URL must be"),
        ("kind=a/b", "kind in the URL must be"),
        ("kind_attribute=a/b", "kind_attribute must be the name of a message attribute"),
        ("retry=43201", "retry must be the whole seconds"),
        ("wait=abc", "wait must be the whole seconds of one long poll"),
    ],
)
def test_a_wrong_option_is_named(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect(f"sqs://q?{query}")


def test_an_unknown_option_is_told_what_there_is() -> None:
    known = "region, endpoint, ttl, account, kind, kind_attribute, retry, wait"
    with pytest.raises(ConfigError, match=f"'colour' in the URL: known are {known}"):
        connect("sqs://q?colour=red")
