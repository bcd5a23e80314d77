"""Since when a run waits to be started, by which a wait that is too long is ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("waiting_since", sa.Double(), nullable=True))
    op.execute("UPDATE runs SET waiting_since = created_at WHERE state IN ('pending', 'queued')")


def downgrade() -> None:
    op.drop_column("runs", "waiting_since")
