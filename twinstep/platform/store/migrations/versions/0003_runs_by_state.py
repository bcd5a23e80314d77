"""Runs of a state in the order of their jobs: a list of the few running jobs among many needs no search."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_runs_state_job_id", "runs", ["state", "job_id"])
    op.drop_index("ix_runs_state", "runs")


def downgrade() -> None:
    op.create_index("ix_runs_state", "runs", ["state"])
    op.drop_index("ix_runs_state_job_id", "runs")
