"""What a URL says: `sqs://thumbnails?region=eu-west-1`, or `sqs://jobs-{kind}` for a queue of each kind."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from leasekit.errors import ConfigError, Refused
from leasekit_aws.addresses import options

__all__ = ["LONGEST_POLL", "LONGEST_TTL", "Address", "address"]

LONGEST_TTL = 12 * 3600
LONGEST_POLL = 20
_WAIT = 5
_SHARED = ("region", "endpoint", "ttl")
_KNOWN = (*_SHARED, "account", "kind", "wait")
_FORM = "a queue's URL is sqs://name?region=…, or sqs://prefix-{kind}?region=… for a queue of each kind"
_QUEUE = re.compile(r"[\w-]{1,80}|[\w-]{1,75}\.fifo", re.ASCII)
_KIND = "{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The queue or queues of one backend, and how they are read."""

    queue: str  # a name, or a template with `{kind}` in it
    region: str | None = None  # None: as boto3 finds out
    endpoint: str | None = None
    account: str | None = None  # whose queue it is, where it is another account's
    kind: str | None = None  # of messages that name none
    ttl: int = 300  # seconds that a claim, and each beat, keeps a message invisible
    # Seconds of one long poll. SQS takes 20; nobody can be asked to stop waiting before, so closing takes as long.
    wait: int = _WAIT

    @property
    def is_template(self) -> bool:
        """True where each kind has a queue of its own."""
        return _KIND in self.queue

    @property
    def is_fifo(self) -> bool:
        """True for queues that keep order."""
        return self.queue.endswith(".fifo")

    def queue_of(self, kind: str) -> str:
        """The name of the queue that tasks of this kind are in. Raises `Refused` where no queue can have that name."""
        name = self.queue.replace(_KIND, kind)
        if not _QUEUE.fullmatch(name):
            raise Refused(f"no queue can be named {name!r}: up to 80 letters, digits, - and _ (and .fifo at the end)")
        return name


def address(url: str) -> Address:
    """What this URL says.

    Raises `ConfigError` where it is none; the message does not repeat it.
    """
    parts = urlsplit(url)
    queue = unquote(parts.netloc)
    if parts.scheme != "sqs" or parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(_FORM)
    if not _QUEUE.fullmatch(queue.replace(_KIND, "k", 1)):
        raise ConfigError(f"the name of the queue is not one that SQS takes: {_FORM}")
    found = _query(parts.query)
    shared = options(urlencode({name: found[name] for name in _SHARED if name in found}))
    if shared.ttl != int(shared.ttl) or shared.ttl > LONGEST_TTL:
        raise ConfigError(f"ttl is whole seconds, 2 to {LONGEST_TTL}: SQS hides a message for no longer")
    if _KIND in queue and "kind" in found:
        raise ConfigError("with {kind} in the name of the queue, its messages are of that kind: leave kind=… out")
    return Address(
        queue=queue,
        region=shared.region,
        endpoint=shared.endpoint,
        account=_account(found.get("account")),
        kind=found.get("kind"),
        ttl=int(shared.ttl),
        wait=_wait(found.get("wait", str(_WAIT))),
    )


def _query(query: str) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20)
    except ValueError:
        raise ConfigError(f"the query of this URL is not name=value&…: it may have {', '.join(_KNOWN)}") from None
    found = dict(pairs)
    if unknown := sorted(set(found) - set(_KNOWN)):
        raise ConfigError(f"this URL has no option {unknown[0]!r}: there are {', '.join(_KNOWN)}")
    if len(found) != len(pairs) or not all(found.values()):
        raise ConfigError("an option is in this URL twice, or empty")
    return found


def _account(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\d{12}", text, re.ASCII):
        raise ConfigError("account is the 12 digits of an AWS account")
    return text


def _wait(text: str) -> int:
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII) or int(text) > LONGEST_POLL:
        raise ConfigError(f"wait is the whole seconds of one long poll, 0 to {LONGEST_POLL}")
    return int(text)
