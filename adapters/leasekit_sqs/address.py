"""The URL of a queue: `sqs://thumbnails?region=eu-west-1`, or `sqs://jobs-{kind}` for one queue per kind."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from leasekit.errors import ConfigError, Refused
from leasekit_aws.addresses import options

LONGEST_TTL = 12 * 3600
LONGEST_POLL = 20
_WAIT = 5
_FORM = "the URL of a queue must be sqs://name?region=…, or sqs://prefix-{kind}?region=… for one queue per kind"
_QUEUE = re.compile(r"[\w-]{1,80}|[\w-]{1,75}\.fifo", re.ASCII)
_KIND = "{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The queue or queues of one backend, and the settings for reading them."""

    queue: str
    """A name, or a template with `{kind}` in it."""
    region: str | None = None
    """None: boto3 finds the region."""
    endpoint: str | None = None
    account: str | None = None
    """The owner of the queue, if it is another account."""
    kind: str | None = None
    """The kind of messages that name none."""
    kind_attribute: str | None = None
    """The message attribute that names the kind of messages without `leasekit.kind`."""
    retry: int | None = None
    """Seconds for which a failed message of another sender waits. None: `ttl`."""
    ttl: int = 300
    """Seconds for which a claim, and each heartbeat, keeps a message invisible."""
    wait: int = _WAIT
    """Seconds of one long poll, at most 20. A poll cannot be stopped early, so closing may take as long."""

    @property
    def is_template(self) -> bool:
        """Whether each kind has a queue of its own."""
        return _KIND in self.queue

    @property
    def longest_poll(self) -> int:
        """The seconds that one receive waits at most: a message is granted at some instant within them."""
        return min(self.wait, max(1, self.ttl // 4))

    @property
    def is_fifo(self) -> bool:
        """Whether the queue is a FIFO queue, which keeps order."""
        return self.queue.endswith(".fifo")

    def queue_of(self, kind: str) -> str:
        """Return the name of the queue for tasks of this kind. Raises `Refused` if no queue can have that name."""
        name = self.queue.replace(_KIND, kind)
        if not _QUEUE.fullmatch(name):
            raise Refused(f"no queue can be named {name!r}: up to 80 letters, digits, - and _ (and .fifo at the end)")
        return name


def address(url: str) -> Address:
    """Parse the URL of a queue. Raises `ConfigError`, whose message never contains the URL."""
    parts = urlsplit(url)
    queue = unquote(parts.netloc)
    if parts.scheme != "sqs" or parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(_FORM)
    if not _QUEUE.fullmatch(queue.replace(_KIND, "k", 1)):
        raise ConfigError(f"SQS does not accept this name of a queue: {_FORM}")
    shared = options(parts.query, "account", "kind", "kind_attribute", "retry", "wait")
    found = shared.more
    if shared.ttl != int(shared.ttl) or shared.ttl > LONGEST_TTL:
        raise ConfigError(f"ttl in the URL must be whole seconds, 2 to {LONGEST_TTL}: SQS hides messages for no longer")
    if _KIND in queue and found.keys() & {"kind", "kind_attribute"}:
        raise ConfigError("{kind} in the name of the queue already says the kind of its messages: leave kind… out")
    return Address(
        queue=queue,
        region=shared.region,
        endpoint=shared.endpoint,
        account=_account(found.get("account")),
        kind=_default_kind(found.get("kind")),
        kind_attribute=_attribute_name(found.get("kind_attribute")),
        retry=_retry(found.get("retry")),
        ttl=int(shared.ttl),
        wait=_wait(found.get("wait", str(_WAIT))),
    )


def _account(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\d{12}", text, re.ASCII):
        raise ConfigError("account must be the 12 digits of an AWS account")
    return text


def _default_kind(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[ -.0-~]{1,128}", text):
        raise ConfigError("kind in the URL must be 1 to 128 printable ASCII characters without /")
    return text


def _attribute_name(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[\w.-]{1,256}", text, re.ASCII):
        raise ConfigError("kind_attribute must be the name of a message attribute: letters, digits, _, - and .")
    return text


def _retry(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > LONGEST_TTL:
        raise ConfigError(f"retry must be the whole seconds until a failed message comes again, 0 to {LONGEST_TTL}")
    return int(text)


def _wait(text: str) -> int:
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII) or int(text) > LONGEST_POLL:
        raise ConfigError(f"wait must be the whole seconds of one long poll, 0 to {LONGEST_POLL}")
    return int(text)
