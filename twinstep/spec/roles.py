"""Who may do what: roles, and the one table from a role to what it allows. Pure.

A role holds in a project. What belongs to no project (tokens, projects, the audit log) is for whoever is admin in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._@+-]*[A-Za-z0-9])?$"
"""Of a user: what fits a log line, a label and a URL."""
NAME_MAX = 32
LOCAL_USER = "user"
"""Whoever uses a control plane that asks for no login."""
BOOTSTRAP = "bootstrap"
"""User of the token that a cluster's Secret holds."""
RESERVED_NAMES = frozenset({LOCAL_USER, BOOTSTRAP, "anonymous", "scheduler", "twinstep", "worker"})
"""Actors of events and of the audit log that nobody is given a token for."""
DEFAULT_PROJECT = "default"
"""The project that is always there."""
TOKEN_PREFIX = "tsp_"  # noqa: S105  how a token begins; scanners for leaked secrets go by it


class Permission(StrEnum):
    """Something a role allows."""

    READ = "read"
    """See jobs and all that belongs to them; plan one."""
    SUBMIT = "submit"
    """Submit jobs, and steer them: cancel, retry, suspend."""
    MANAGE = "manage"
    """Say who is a member of a project."""
    ADMINISTER = "administer"
    """Tokens, projects, webhooks and the audit log: for admins of all projects."""


class Role(StrEnum):
    """What somebody is in a project, the least first."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"


PERMISSIONS: Mapping[Role, frozenset[Permission]] = {
    Role.VIEWER: frozenset({Permission.READ}),
    Role.SUBMITTER: frozenset({Permission.READ, Permission.SUBMIT}),
    Role.ADMIN: frozenset(Permission),
}


def lesser(one: Role, other: Role) -> Role:
    """Return the role that allows less."""
    return min(one, other, key=lambda role: len(PERMISSIONS[role]))
