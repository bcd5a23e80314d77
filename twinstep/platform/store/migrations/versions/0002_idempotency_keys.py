"""Keys by which a submit that is sent twice is known for one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id_jobs", ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("idempotency_keys")
