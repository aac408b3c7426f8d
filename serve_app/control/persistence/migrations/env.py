"""What alembic runs: every step that is missing, on the connection that database.py gives.

The connection is already in a transaction that keeps other writers out, and the caller that opened it
commits, so that a start that is killed in mid-step leaves the old schema whole.
"""

from alembic import context

from serve_app.control.persistence.schema import SCHEMA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SCHEMA,
    version_table=VERSION_TABLE,
)
context.run_migrations()
