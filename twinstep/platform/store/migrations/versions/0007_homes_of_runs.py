"""Which control plane's machine a local run is on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("home", sa.String(32), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "home")
