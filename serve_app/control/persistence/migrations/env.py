"""What alembic runs: every step that is missing, on the connection that database.py gives.

The connection is already in a transaction that keeps other writers out, and the caller that opened it
commits, so that a start that is killed in mid-step leaves the old schema whole.
"""

from alembic import context

from serve_app.control.persistence.database import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SCHEMA,
    version_table="torchrelay_schema",  # a database may hold the tables of others, and their alembic
)
context.run_migrations()
