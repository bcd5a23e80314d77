"""Where a run runs, what it is there, what is wished of it, and how long it has been active."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def _columns() -> list[sa.Column]:
    return [
        sa.Column("backend", sa.String(16), nullable=False, server_default="local"),
        sa.Column("restarts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("spec", sa.JSON(), nullable=True),
        sa.Column("cluster", sa.JSON(), nullable=True),
        sa.Column("diagnosis", sa.JSON(), nullable=True),
        sa.Column("suspend_requested_at", sa.Double(), nullable=True),
        sa.Column("suspended_at", sa.Double(), nullable=True),
        sa.Column("resumed_from", sa.String(32), nullable=True),
        sa.Column("active_since", sa.Double(), nullable=True),
        sa.Column("active_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("spare_token_hash", sa.String(64), nullable=True),
    ]


def upgrade() -> None:
    for column in _columns():
        op.add_column("runs", column)


def downgrade() -> None:
    # Not in a batch: on SQLite that makes `runs` anew, and what hangs on it (events, metrics, logs) would go.
    for column in _columns():
        op.drop_column("runs", column.name)
