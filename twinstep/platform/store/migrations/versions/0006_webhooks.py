"""Who is told of what happens, and what is yet to be told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("types", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(80), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.Double(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("disabled_at", sa.Double(), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_table(
        "webhook_outbox",
        sa.Column("id", COUNTER, autoincrement=True, nullable=False),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("event_id", COUNTER, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("first_tried_at", sa.Double(), nullable=True),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_outbox"),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_webhook_outbox_webhook_id_webhooks", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_webhook_outbox_job_id_jobs", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["event_id"], ["events.id"], name="fk_webhook_outbox_event_id_events", ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhook_outbox_webhook_id_job_id_id", "webhook_outbox", ["webhook_id", "job_id", "id"])


def downgrade() -> None:
    for table in ("webhook_outbox", "webhooks"):
        op.drop_table(table)
