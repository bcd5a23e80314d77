"""Who asks, and what they may do: what the gate before every route and page decides by. Blocks; any thread.

Where no token was ever made, a control plane on loopback asks for none: whoever reaches it is its admin. From the
first token on it asks, for good, also when every token has been revoked; elsewhere than on loopback it always does.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from twinstep.platform.scheduler.projects import place
from twinstep.platform.settings import DATABASE, Settings, is_loopback
from twinstep.platform.store.audit import AuditLog
from twinstep.platform.store.database import Database
from twinstep.platform.store.entry import Entry, current_entry, under_way
from twinstep.platform.store.users import Known, Project, Token, Users, hash_secret, no_project
from twinstep.spec.errors import Fault, ForbiddenError, NotFoundError, SpecError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import (
    DEFAULT_PROJECT,
    LOCAL_USER,
    NAME,
    NAME_MAX,
    PERMISSIONS,
    RESERVED_NAMES,
    TOKEN_PREFIX,
    Permission,
    Role,
    lesser,
)

By = Literal["nothing", "token", "session"]
LOOK_AGAIN_S = 1.0  # a token made beside a control plane that asks for none is noticed so soon
MAX_REMEMBERED = 1000  # projects
TOKEN = re.compile(TOKEN_PREFIX + r"[A-Za-z0-9_-]{43,200}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """Whoever asks: a user, by way of one of their tokens."""

    user: str
    role: Role
    """The most they may by way of this token."""
    everywhere: bool
    """Whether they reach every project, member or not."""
    members: Mapping[str, Role] = field(default_factory=dict)
    """What they are in each project."""
    token_id: str | None = None
    """None: no login is asked for."""
    by: By = "nothing"
    """How they are known."""
    session: str | None = None
    """Hash of the cookie they are known by, so that what outlives its request ends when they log out."""

    @property
    def is_local(self) -> bool:
        """Say whether they use a control plane that asks for no login."""
        return self.by == "nothing" and self.everywhere

    def role_in(self, project: str | None) -> Role | None:
        """Return what they may be in a project; None: they are not to know of it."""
        if self.everywhere:
            return self.role
        member = self.members.get(project or "")
        return None if member is None else lesser(member, self.role)

    def may(self, permission: Permission, project: str | None = None) -> bool:
        """Say whether they may, in a project; what belongs to none is for admins of all projects."""
        if permission is Permission.ADMINISTER:
            return self.everywhere and permission in PERMISSIONS[self.role]
        role = self.role_in(project)
        return role is not None and permission in PERMISSIONS[role]

    def projects(self, permission: Permission = Permission.READ) -> frozenset[str] | None:
        """Return the projects in which they may; None: in every one."""
        if self.everywhere:
            return None if permission in PERMISSIONS[self.role] else frozenset()
        return frozenset(name for name in self.members if self.may(permission, name))


LOCAL = Principal(user=LOCAL_USER, role=Role.ADMIN, everywhere=True)
"""Whoever uses a control plane that asks for no login."""
NOBODY = Principal(user="anonymous", role=Role.VIEWER, everywhere=False)
"""Whoever asks for what is open to anybody."""


class Accounts:
    """Tokens, projects and the audit log, to those who ask."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.users = Users(database)
        self.audit = AuditLog(database)
        self._no_login = settings.no_login
        self._asks = not is_loopback(settings.host)
        self._looked_at = -LOOK_AGAIN_S
        self._projects: dict[str, Project] = {}

    # ---- login ----

    def asks_for_login(self) -> bool:
        """Say whether a token is asked for; asks the database at most once a second, and never again once it is."""
        if not self._asks and not self._no_login and time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
            self._asks = self.users.any_token()
            self._looked_at = time.monotonic()
        return self._asks

    def knows(self) -> bool | None:
        """Say whether a token is asked for, where that needs no look into the database; None where it does."""
        if self._asks or self._no_login or time.monotonic() - self._looked_at < LOOK_AGAIN_S:
            return self._asks
        return None

    def look_again(self) -> None:
        """Take up at once that a token was made."""
        self._looked_at = -LOOK_AGAIN_S

    def by_token(self, secret: str) -> Principal | None:
        """Return whose token this is; None where it is nobody's."""
        if not TOKEN.fullmatch(secret):
            return None
        return _principal(self.users.by_secret(secret), "token")

    def by_session(self, cookie: str) -> Principal | None:
        """Return whose session this is; None where it is nobody's."""
        if not 0 < len(cookie) <= 200:
            return None
        hashed = hash_secret(cookie)
        return _principal(self.users.by_session(hashed), "session", session=hashed)

    def still(self, principal: Principal) -> Principal | None:
        """Return what a principal may now, for what outlives its request; None: they are logged out."""
        if principal.is_local:
            return None if self.asks_for_login() else principal
        if principal.session is not None:
            return _principal(self.users.by_session(principal.session), "session", session=principal.session)
        return _principal(self.users.by_id(principal.token_id or ""), principal.by)

    # ---- what they may ----

    def check(self, principal: Principal, permission: Permission, project: str | None) -> None:
        """Raise unless they may.

        Raises:
            NotFoundError: they are not to know of the project.
            ForbiddenError: they are, and may not do this.
        """
        if principal.may(permission, project):
            return
        if permission is not Permission.ADMINISTER and principal.role_in(project) is None:
            raise no_project(project or "")
        where = f" in the project {project}" if project is not None else ""
        raise ForbiddenError(
            f"{principal.user} may not {permission}{where} with this token",
            remedy="ask an admin for a role that may, or use a token that allows more",
        )

    def check_job(self, principal: Principal, permission: Permission, job_id: str) -> None:
        """Raise unless they may do this to a job.

        Raises:
            NotFoundError: there is no such job, or they are not to know of it: one answer for both.
            ForbiddenError: they may see it, and not do this.
        """
        if principal.is_local:
            return
        project = self.users.project_of_job(job_id)
        if (entry := current_entry()) is not None:
            entry.project = project
        if project is None or principal.role_in(project) is None:
            raise NotFoundError(f"there is no job {job_id!r}", remedy="list the jobs: twinstep ls, or GET /v1/jobs")
        self.check(principal, permission, project)

    def project_for(self, principal: Principal, given: str | None) -> Project:
        """Return the project a submit goes to: the one given, the default one, or the only one they may submit to.

        It is remembered from then on; see `remembered_project`.

        Raises:
            NotFoundError: there is none of that name, so far as they are to know.
            ForbiddenError: they may not submit there.
            SpecError: none was given, and several come into question.
        """
        name = self._project_name(principal, given)
        if len(self._projects) >= MAX_REMEMBERED:
            self._projects.clear()
        self._projects[name] = found = self.users.project(name)
        return found

    def remembered_project(self, principal: Principal, given: str | None) -> Project | None:
        """Return the project a submit goes to without a look into the database; None where that takes one.

        It may be gone, or be another, by now: whoever stores something in it holds the two together.
        """
        return self._projects.get(self._project_name(principal, given))

    def _project_name(self, principal: Principal, given: str | None) -> str:
        if given is None:
            names = principal.projects(Permission.SUBMIT)
            if names is None or DEFAULT_PROJECT in names:
                given = DEFAULT_PROJECT
            elif len(names) == 1:
                (given,) = names
            elif not names:
                raise ForbiddenError(
                    f"{principal.user} may submit to no project with this token",
                    remedy="ask an admin: twinstep member add PROJECT USER --role submitter",
                )
            else:
                fault = Fault(
                    field="project", problem="is not given", allowed=", ".join(sorted(names)[:20]),
                    remedy=f"?project={min(names)}, or --project {min(names)}",
                )  # fmt: skip
                raise SpecError("the project is not given", remedy=fault.remedy, faults=(fault,))
        self.check(principal, Permission.SUBMIT, given)
        return given

    def place(self, principal: Principal, spec: JobSpec, given: str | None) -> JobSpec:
        """Return a spec with what its project says of where it runs; see `project_for` and `place`."""
        return self.place_in(self.project_for(principal, given), principal, spec)

    def place_in(self, project: Project, principal: Principal, spec: JobSpec) -> JobSpec:
        """Return a spec with what a project says of where it runs; see `place`. Asks no database."""
        return place(spec, project, freely=principal.may(Permission.ADMINISTER))

    # ---- start ----

    def prepare(self, settings: Settings) -> None:
        """Take in the bootstrap token, and refuse to start where nobody could log in.

        Raises:
            UnavailableError: the address is not loopback and there is no usable token of an admin, or the file with
                the bootstrap token cannot be used.
        """
        if (file := settings.bootstrap_token_file) is not None:
            try:
                secret = file.read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise UnavailableError(
                    f"the bootstrap token's file {file} cannot be read: {getattr(error, 'strerror', None) or error}",
                    remedy="mount the Secret there, or unset TWINSTEP_BOOTSTRAP_TOKEN_FILE",
                ) from None
            if not TOKEN.fullmatch(secret):
                raise UnavailableError(
                    f"what {file} holds is no token: {TOKEN_PREFIX} and 43 or more of A-Z, a-z, 0-9, _ and -",
                    remedy="write one there: twinstep token new",
                )
            self.users.bootstrap(secret)
        if not is_loopback(settings.host) and not self.users.has_admin():
            raise _no_admin(settings)
        self.asks_for_login()


def refuse_unprotected(settings: Settings) -> None:
    """Raise UnavailableError where nobody could log in for certain: before anything is made that stays behind."""
    there_may_be_one = settings.bootstrap_token_file or settings.database_url or (settings.data_dir / DATABASE).exists()
    if not is_loopback(settings.host) and not there_may_be_one:
        raise _no_admin(settings)


def _no_admin(settings: Settings) -> UnavailableError:
    # A URL may hold a password, which is nobody's to print.
    where = "--database-url URL" if settings.database_url else f"--data-dir {shlex.quote(str(settings.data_dir))}"
    return UnavailableError(
        f"{settings.host} is not a loopback address, and there is no admin's token to protect it",
        remedy=f"make one first: twinstep token create USER --admin --offline {where}",
    )


def create_offline(
    settings: Settings, user: str, *, role: Role, everywhere: bool, expires_at: float | None
) -> tuple[Token, str]:
    """Write a token into the database itself, whether or not a control plane runs on it; return it and its secret.

    Raises:
        UnavailableError: the data directory or the database cannot be used.
        SpecError: no user can have this name.
        ConflictError: it is the first one, and not an admin's.
    """
    check_name(user)
    database = Database(settings.database)
    try:
        entry = Entry(actor=LOCAL_USER, action="token.create", data={"offline": True})
        with under_way(entry):
            return Users(database).create_token(
                user, role=role, everywhere=everywhere, created_by=LOCAL_USER, expires_at=expires_at
            )
    finally:
        database.close()


def _principal(known: Known | None, by: By, *, session: str | None = None) -> Principal | None:
    if known is None:
        return None
    token = known.token
    return Principal(
        user=token.user,
        role=token.role,
        everywhere=token.everywhere,
        members=known.members,
        token_id=token.id,
        by=by,
        session=session,
    )


def check_name(name: str) -> None:
    """Raise SpecError where a name is none that a user can have."""
    if len(name) <= NAME_MAX and re.fullmatch(NAME, name) and name not in RESERVED_NAMES:
        return
    fault = Fault(
        field="user",
        problem="is not a name that a user can have",
        given=repr(name[:100]),
        allowed=f"1 to {NAME_MAX} letters, digits and . _ @ + -; not one of {', '.join(sorted(RESERVED_NAMES))}",
        remedy="give another name",
    )
    raise SpecError("the user's name is not valid", remedy=fault.remedy, faults=(fault,))
