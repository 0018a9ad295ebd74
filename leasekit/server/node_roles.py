"""The roles of a server, with the names of ATF: servers of one database may have some each."""

from collections.abc import Collection
from enum import StrEnum

from leasekit.errors import ConfigError

__all__ = ["ALL_ROLES", "Role", "listed", "parsed_roles", "role_of"]


class Role(StrEnum):
    """A part of the work of a server."""

    FRONTEND = "frontend"
    """Answer clients that schedule tasks, ask for them, and operate the service."""
    HSC = "hsc"
    """The heartbeat and status controller: answer workers, which claim tasks, renew leases and report results."""
    CONSUMER = "consumer"
    """Expire leases, move due tasks to queues, fire periodic tasks, and remove old tasks."""


ALL_ROLES = frozenset(Role)

_OF_WORKERS = frozenset({"/v1/claims", "/v1/heartbeats", "/v1/results", "/v1/cancels"})
_OF_ALL = frozenset({"/v1/nodes", "/metrics", "/healthz", "/readyz", "/openapi.json"})


def role_of(path: str) -> Role | None:
    """Return the role that the operations of a path need; None: each server has them."""
    if path in _OF_ALL:
        return None
    return Role.HSC if path in _OF_WORKERS else Role.FRONTEND


def parsed_roles(text: str) -> frozenset[Role]:
    """Return the roles in a text as `frontend,hsc`. Raises `ConfigError` for one that does not exist."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in ALL_ROLES]:
        raise ConfigError(f"there is no role {unknown[0]!r}: name one or more of {listed(ALL_ROLES)}")
    return frozenset(map(Role, names))


def listed(roles: Collection[Role]) -> str:
    """Return roles in the form in which they are given."""
    return ",".join(role for role in Role if role in roles)
