"""Alembic's entry: runs the migrations on the connection that database.py hands over, inside its transaction."""

from __future__ import annotations

from alembic import context

from twinstep.platform.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
