"""Logs of runs in a cluster, which are gone with their pods there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "run_logs",
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("gap_begin", sa.BigInteger(), nullable=False),
        sa.Column("gap_end", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_run_logs"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_logs_run_id_runs", ondelete="CASCADE"),
    )
    op.create_table(
        "log_sources",
        sa.Column("id", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("pod_uid", sa.String(64), nullable=False),
        sa.Column("container", sa.String(63), nullable=False),
        sa.Column("pod", sa.String(253), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("host", sa.Integer(), nullable=True),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("instance", sa.Integer(), nullable=False),
        sa.Column("read_time", sa.String(40), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_log_sources"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_log_sources_run_id_runs", ondelete="CASCADE"),
        sa.UniqueConstraint("run_id", "pod_uid", "container", name="uq_log_sources_run_id_pod_uid_container"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "log_parts",
        sa.Column("id", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("source_id", _COUNTER, nullable=True),
        sa.Column("begin", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_log_parts"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_log_parts_run_id_runs", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["source_id"], ["log_sources.id"], name="fk_log_parts_source_id_log_sources", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("run_id", "begin", name="uq_log_parts_run_id_begin"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    for table in ("log_parts", "log_sources", "run_logs"):
        op.drop_table(table)
