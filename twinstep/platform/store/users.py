"""Tokens, sessions, projects and members: who there is, and what each may reach. Nothing is kept in memory, so what
is revoked is refused from the next request on, in every replica.

Tokens are kept as SHA-256. They are 256 random bits: there is nothing to guess and no dictionary to try, so a slow
hash, which protects passwords people choose, would only make each request dear.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from pydantic import Field
from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from twinstep.platform.store.audit import write_entry
from twinstep.platform.store.database import Database
from twinstep.platform.store.ids import new_id
from twinstep.platform.store.records import View
from twinstep.platform.store.tables import JobRow, MemberRow, ProjectRow, RunRow, SessionRow, TokenRow
from twinstep.spec.errors import ConflictError, NotFoundError, UnavailableError
from twinstep.spec.roles import BOOTSTRAP, DEFAULT_PROJECT, TOKEN_PREFIX, Role
from twinstep.spec.states import LIVE

TOKEN_BYTES = 32
SEEN_EVERY_S = 60.0  # a token's last use is written at most so often
SESSION_S = 12 * 3600.0  # a browser shows its token again after so long


class Token(View):
    """A user's token, without what it is proven by."""

    id: str
    """`tok-…`: what it is revoked by."""
    user: str
    """Whose it is: the actor of events and of the audit log."""
    role: Role
    """The most it allows, whatever its user is in a project."""
    everywhere: bool
    """Whether it reaches every project, and with the role admin tokens, projects and the audit log."""
    created_at: float
    created_by: str
    expires_at: float | None
    """From then on it is refused; null: never."""
    last_used_at: float | None
    """To the minute."""
    revoked_at: float | None

    def usable(self, now: float) -> bool:
        """Say whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class Project(View):
    """Jobs that belong together, and where they run."""

    name: str
    namespace: str
    """Kubernetes namespace of its jobs."""
    queue: str | None = None
    """Kueue LocalQueue that admits its jobs; null: a job names its own, or none."""
    image: str | None = None
    """Container image of workers, where a job names none."""
    created_at: float = Field(description="When it was made.")


class Member(View):
    """What a user is in a project."""

    user: str
    role: Role


class Known(View):
    """A token that was shown, and what its user is in each project."""

    token: Token
    members: dict[str, Role]


def new_token() -> str:
    """Return a token: 256 random bits, with a prefix by which a leaked one is known."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_secret(secret: str) -> str:
    """Return the SHA-256 that a token or a cookie is kept as."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


_TOKEN_FIELDS = [getattr(TokenRow, name) for name in Token.model_fields]


class Users:
    """Tokens, sessions, projects and members in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # ---- tokens ----

    def any_token(self) -> bool:
        """Say whether a token was ever made: from then on a login is asked for."""
        with self._database.read() as connection:
            return connection.execute(select(TokenRow.id).limit(1)).first() is not None

    def has_admin(self) -> bool:
        """Say whether an admin of all projects could log in now."""
        with self._database.read() as connection:
            return connection.execute(_admins(time.time()).limit(1)).first() is not None

    def create_token(
        self,
        user: str,
        *,
        role: Role,
        everywhere: bool,
        created_by: str,
        expires_at: float | None = None,
        secret: str | None = None,
    ) -> tuple[Token, str]:
        """Store a token; return it and its secret, which nobody can tell again.

        Raises:
            ConflictError: it is the first one, and not an admin's: nobody could make a second.
        """
        secret = secret or new_token()
        token = Token(
            id=new_id("tok"), user=user, role=role, everywhere=everywhere, created_at=time.time(),
            created_by=created_by, expires_at=expires_at, last_used_at=None, revoked_at=None,
        )  # fmt: skip
        with self._database.write() as connection:
            first = connection.execute(select(TokenRow.id).limit(1)).first() is None
            if first and not (everywhere and role is Role.ADMIN):
                raise ConflictError(
                    "the first token must be an admin's: from then on a login is asked for",
                    remedy="make one for yourself first: twinstep token create USER --admin",
                )
            connection.execute(insert(TokenRow).values(**token.model_dump(), hash=hash_secret(secret)))
            write_entry(connection, target=token.id, user=user, role=role, everywhere=everywhere)
        return token, secret

    def list_tokens(self, *, user: str | None = None) -> list[Token]:
        """Return every token, the newest first; of one user where one is given."""
        query = select(*_TOKEN_FIELDS).order_by(TokenRow.id.desc())
        if user is not None:
            query = query.where(TokenRow.user == user)
        with self._database.read() as connection:
            return [Token.model_validate(row._asdict()) for row in connection.execute(query)]

    def revoke_token(self, token_id: str) -> Token:
        """Refuse a token from now on, and the sessions made with it. Again changes nothing.

        Raises:
            NotFoundError: no such token.
            ConflictError: no admin of all projects would be left who can log in.
        """
        now = time.time()
        with self._database.write() as connection:
            # One at a time: of two admins who revoke each other's last token, one is refused.
            admins = set(connection.execute(_admins(now).with_for_update()).scalars())
            if admins == {token_id}:
                raise ConflictError(
                    f"{token_id} is the last token of an admin of all projects",
                    remedy="make another first: twinstep token create USER --admin",
                )
            connection.execute(
                update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None)).values(revoked_at=now)
            )
            connection.execute(delete(SessionRow).where(SessionRow.token_id == token_id))
            row = connection.execute(select(*_TOKEN_FIELDS).where(TokenRow.id == token_id)).one_or_none()
            if row is None:
                raise NotFoundError(f"there is no token {token_id[:64]!r}", remedy="list them: twinstep token list")
            write_entry(connection, target=token_id, user=row.user)
        return Token.model_validate(row._asdict())

    def bootstrap(self, secret: str) -> None:
        """See to it that the token a cluster's Secret holds is an admin's; one it held before is revoked.

        One that an admin revoked stays so, whatever the Secret holds.
        """
        hashed, now = hash_secret(secret), time.time()
        with self._database.write() as connection:
            connection.execute(
                update(TokenRow)
                .where(TokenRow.user == BOOTSTRAP, TokenRow.hash != hashed, TokenRow.revoked_at.is_(None))
                .values(revoked_at=now)
            )
            known = connection.execute(select(TokenRow.id).where(TokenRow.hash == hashed)).first()
        if known is None:
            try:
                self.create_token(BOOTSTRAP, role=Role.ADMIN, everywhere=True, created_by=BOOTSTRAP, secret=secret)
            except IntegrityError:
                return  # another replica was there first

    # ---- who asks ----

    def by_secret(self, secret: str) -> Known | None:
        """Return whose token this is; None where it is nobody's, revoked or expired."""
        return self._known(TokenRow.hash == hash_secret(secret), hash_secret(secret))

    def by_session(self, hashed: str) -> Known | None:
        """Return whose session this is, by the hash of its cookie; None where it is over, or its token is."""
        query = select(SessionRow.token_id).where(SessionRow.hash == hashed, SessionRow.expires_at > time.time())
        return self._known(TokenRow.id == query.scalar_subquery())

    def by_id(self, token_id: str) -> Known | None:
        """Return what a token allows now; None where it is revoked or expired."""
        return self._known(TokenRow.id == token_id)

    def _known(self, which: Any, hashed: str | None = None) -> Known | None:
        query = (
            select(*_TOKEN_FIELDS, TokenRow.hash, MemberRow.project, MemberRow.role.label("member"))
            .join(MemberRow, MemberRow.user == TokenRow.user, isouter=True)
            .where(which)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        if not rows or (hashed is not None and not hmac.compare_digest(rows[0].hash, hashed)):
            return None
        token, now = Token.model_validate(rows[0]._asdict()), time.time()
        if not token.usable(now):
            return None
        self._note_use(token, now)
        return Known(token=token, members={row.project: Role(row.member) for row in rows if row.project is not None})

    def _note_use(self, token: Token, now: float) -> None:
        if token.last_used_at is not None and now - token.last_used_at < SEEN_EVERY_S:
            return
        query = update(TokenRow).where(
            TokenRow.id == token.id, or_(TokenRow.last_used_at.is_(None), TokenRow.last_used_at <= now - SEEN_EVERY_S)
        )
        # A database that takes no more, whose disk is full say, can still be read.
        with suppress(UnavailableError), self._database.write() as connection:
            connection.execute(query.values(last_used_at=now))

    # ---- sessions ----

    def open_session(self, token_id: str) -> tuple[str, int]:
        """Store a session of a token; return its cookie and the seconds it lasts. Those that are over are deleted."""
        cookie, now = secrets.token_urlsafe(TOKEN_BYTES), time.time()
        row = {"hash": hash_secret(cookie), "token_id": token_id, "created_at": now, "expires_at": now + SESSION_S}
        with self._database.write() as connection:
            connection.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            connection.execute(insert(SessionRow).values(**row))
            write_entry(connection, target=token_id)
        return cookie, int(SESSION_S)

    def close_session(self, cookie: str) -> None:
        """Forget a session; nothing where there is none."""
        with self._database.write() as connection:
            connection.execute(delete(SessionRow).where(SessionRow.hash == hash_secret(cookie)))

    # ---- projects ----

    def create_project(self, name: str, *, namespace: str, queue: str | None, image: str | None) -> Project:
        """Store a project.

        Raises:
            ConflictError: there is one of the name, or there are jobs of one that was deleted.
        """
        project = Project(name=name, namespace=namespace, queue=queue, image=image, created_at=time.time())
        taken = ConflictError(f"there is a project {name}, or there was one with jobs", remedy="give another name")
        try:
            with self._database.write() as connection:
                if connection.execute(select(JobRow.id).where(JobRow.project == name).limit(1)).first() is not None:
                    raise taken  # the members of a new one would see the jobs of the old
                connection.execute(insert(ProjectRow).values(**project.model_dump()))
                write_entry(connection, target=name, project=name, **project.model_dump(exclude={"name", "created_at"}))
        except IntegrityError:
            raise taken from None
        return project

    def projects(self) -> list[Project]:
        """Return every project by name."""
        with self._database.read() as connection:
            rows = connection.execute(select(ProjectRow.__table__).order_by(ProjectRow.name)).all()
        return [Project.model_validate(row._asdict()) for row in rows]

    def project(self, name: str) -> Project:
        """Return a project, or raise NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(ProjectRow.__table__).where(ProjectRow.name == name)).one_or_none()
        if row is None:
            raise no_project(name)
        return Project.model_validate(row._asdict())

    def delete_project(self, name: str) -> None:
        """Delete a project and its members. Its jobs stay; admins of all projects see them.

        Raises:
            NotFoundError: no such project.
            ConflictError: it has jobs that have not ended, or is the one that is always there.
        """
        if name == DEFAULT_PROJECT:
            raise ConflictError(f"the project {name} is always there", remedy="take its members away instead")
        live = select(func.count()).select_from(RunRow).join(JobRow, JobRow.id == RunRow.job_id)
        with self._database.write() as connection:
            _require(connection, name, alone=True)  # from here on nobody submits to it; who did before is counted
            count = connection.execute(live.where(JobRow.project == name, RunRow.state.in_(sorted(LIVE)))).scalar_one()
            if count:
                raise ConflictError(f"{count} runs of {name} have not ended", remedy="cancel them, or wait for them")
            connection.execute(delete(ProjectRow).where(ProjectRow.name == name))
            write_entry(connection, target=name, project=name)

    def members(self, project: str) -> list[Member]:
        """Return a project's members by name, or raise NotFoundError."""
        with self._database.read() as connection:
            _require(connection, project)
            rows = connection.execute(
                select(MemberRow.user, MemberRow.role).where(MemberRow.project == project).order_by(MemberRow.user)
            ).all()
        return [Member.model_validate(row._asdict()) for row in rows]

    def set_member(self, project: str, user: str, role: Role) -> Member:
        """Make a user a member of a project, or give a member another role; NotFoundError where there is no such."""
        with self._database.write() as connection:
            _require(connection, project, alone=True)
            connection.execute(delete(MemberRow).where(MemberRow.project == project, MemberRow.user == user))
            connection.execute(insert(MemberRow).values(project=project, user=user, role=role))
            write_entry(connection, target=user, project=project, role=role)
        return Member(user=user, role=role)

    def remove_member(self, project: str, user: str) -> None:
        """Take a member away, or raise NotFoundError."""
        query = delete(MemberRow).where(MemberRow.project == project, MemberRow.user == user)
        with self._database.write() as connection:
            _require(connection, project, alone=True)
            if not connection.execute(query).rowcount:
                raise NotFoundError(
                    f"{user[:64]!r} is no member of {project}", remedy=f"list them: twinstep member list {project}"
                )
            write_entry(connection, target=user, project=project)

    def project_of_job(self, job_id: str) -> str | None:
        """Return the project a job belongs to; None where there is no such job."""
        with self._database.read() as connection:
            return connection.execute(select(JobRow.project).where(JobRow.id == job_id)).scalar_one_or_none()


def no_project(name: str) -> NotFoundError:
    """Return the error of a project that is not there, or that its user is not to know of."""
    return NotFoundError(f"there is no project {name[:63]!r}", remedy="list yours: twinstep project list")


_HELD = select(ProjectRow.__table__).where(ProjectRow.name.in_(bindparam("names", expanding=True)))
_HELD = _HELD.order_by(ProjectRow.name).with_for_update(read=True, key_share=True)


def held_projects(connection: Connection, names: Collection[str]) -> dict[str, Project]:
    """Return those of some projects that are there; none of them is deleted before the caller's transaction ends."""
    rows = connection.execute(_HELD, {"names": sorted(names)})
    return {row.name: Project.model_validate(row._asdict()) for row in rows}


def _require(connection: Connection, project: str, *, alone: bool = False) -> None:
    """Raise NotFoundError where there is no such project; `alone`: no other transaction changes it meanwhile."""
    query = select(ProjectRow.name).where(ProjectRow.name == project)
    if connection.execute(query.with_for_update() if alone else query).first() is None:
        raise no_project(project)


def _admins(now: float) -> Any:
    """Return the query for the ids of tokens by which an admin of all projects can log in."""
    return select(TokenRow.id).where(
        TokenRow.everywhere.is_(True),
        TokenRow.role == Role.ADMIN,
        TokenRow.revoked_at.is_(None),
        or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > now),
    )
