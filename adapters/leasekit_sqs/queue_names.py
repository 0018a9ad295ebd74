"""The URL of queues by which a server tells workers of due tasks: `sqs://jobs-{kind}-{priority}?region=eu-west-1`."""

import re
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import unquote, urlsplit

from leasekit.errors import ConfigError
from leasekit.queues import QueueName
from leasekit_aws.addresses import options

_KIND, _PRIORITY = "{kind}", "{priority}"
_FORM = "the URL of queues must be sqs://jobs-{kind}-{priority}?region=…: each kind has a queue for each priority"
_TEMPLATE = re.compile(r"[\w-]{1,60}", re.ASCII)
_PLAIN = re.compile(r"[\w-]+", re.ASCII)
_LONGEST = 80  # characters of a name that SQS takes
_DIGITS = 16  # of the digest in the name of a queue for a kind that SQS cannot name
_SHORTEST_WAIT, _LONGEST_WAIT = 1, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesAddress:
    """The queues of all kinds, and where they are."""

    template: str
    """The name of a queue, with `{kind}` and `{priority}` in it."""
    region: str | None = None
    """None: boto3 finds the region."""
    endpoint: str | None = None
    account: str | None = None
    """The owner of the queues, if it is another account."""
    wait: int = 5
    """Seconds of one long poll. A poll cannot be stopped early, so closing may take as long."""

    def name_of(self, queue: QueueName) -> str:
        """Return the name of a queue in SQS; the kind is named by a digest if SQS does not take it as it is."""
        template = self.template.replace(_PRIORITY, str(queue.priority))
        name = template.replace(_KIND, queue.kind)
        if _PLAIN.fullmatch(queue.kind) and len(name) <= _LONGEST:
            return name
        digest = sha256(queue.kind.encode()).hexdigest()[:_DIGITS]
        room = _LONGEST - len(template.replace(_KIND, "_" + digest))
        return template.replace(_KIND, f"{re.sub(r'[^A-Za-z0-9-]', '-', queue.kind)[:room]}_{digest}")


def address(url: str) -> QueuesAddress:
    """Parse the URL of queues. Raises `ConfigError`, whose message never contains the URL."""
    parts = urlsplit(url)
    template = unquote(parts.netloc)
    if parts.scheme != "sqs" or parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(_FORM)
    if template.endswith(".fifo"):
        raise ConfigError("queues of due tasks must be standard queues: a FIFO queue drops a message that is repeated")
    if (template.count(_KIND), template.count(_PRIORITY)) != (1, 1):
        raise ConfigError(f"the name of the queues must have {{kind}} once and {{priority}} once: {_FORM}")
    if not _TEMPLATE.fullmatch(template.replace(_KIND, "k").replace(_PRIORITY, "0")):
        raise ConfigError(f"SQS does not take this name: up to 60 letters, digits, - and _ beside {{kind}}: {_FORM}")
    found = options(parts.query, "account", "wait", has_ttl=False)
    if (account := found.more.get("account")) is not None and not re.fullmatch(r"\d{12}", account, re.ASCII):
        raise ConfigError("account must be the 12 digits of an AWS account")
    wait = found.more.get("wait", "5")
    if not re.fullmatch(r"\d{1,2}", wait, re.ASCII) or not _SHORTEST_WAIT <= int(wait) <= _LONGEST_WAIT:
        raise ConfigError(f"wait must be the whole seconds of one long poll, {_SHORTEST_WAIT} to {_LONGEST_WAIT}")
    return QueuesAddress(
        template=template, region=found.region, endpoint=found.endpoint, account=account, wait=int(wait)
    )
