"""Users' tokens and sessions, projects and their members, the audit log; whose a job and an Idempotency-Key is."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _users()
    _projects()
    _audit()
    op.add_column("jobs", sa.Column("project", sa.String(63), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("submitted_by", sa.String(32), nullable=False, server_default="user"))
    op.create_index("ix_jobs_project_id", "jobs", ["project", "id"])
    # Keys are good for a submit that is sent again within minutes: none is carried over.
    op.drop_table("idempotency_keys")
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name="pk_idempotency_keys"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id_jobs", ondelete="CASCADE"),
    )


def _users() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user", sa.String(32), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("everywhere", sa.Boolean(), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
    )
    op.create_index("ix_tokens_user", "tokens", ["user"])
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("token_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_sessions"),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_sessions_token_id_tokens", ondelete="CASCADE"),
    )


def _projects() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("queue", sa.String(63), nullable=True),
        sa.Column("image", sa.String(512), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )
    op.bulk_insert(projects, [{"name": "default", "namespace": "default", "created_at": time.time()}])
    op.create_table(
        "members",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("user", sa.String(32), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("project", "user", name="pk_members"),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_members_project_projects", ondelete="CASCADE"),
    )
    op.create_index("ix_members_user", "members", ["user"])


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", COUNTER, autoincrement=True, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(32), nullable=False),
        sa.Column("token_id", sa.String(32), nullable=True),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("project", sa.String(63), nullable=True),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    if op.get_bind().dialect.name == "sqlite":
        for what in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit log is only added to'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_is_only_added_to() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is only added to'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_only_added_to()"
    )


def downgrade() -> None:
    op.drop_table("idempotency_keys")
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id_jobs", ondelete="CASCADE"),
    )
    op.drop_index("ix_jobs_project_id", "jobs")
    for column in ("project", "submitted_by"):
        op.drop_column("jobs", column)
    for table in ("audit", "members", "projects", "sessions", "tokens"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_is_only_added_to()")
