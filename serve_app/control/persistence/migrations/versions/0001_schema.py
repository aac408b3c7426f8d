"""The first schema. A new database gets the newest one at once, from the tables in schema.py."""

revision = "schema_1"
down_revision = None


def upgrade() -> None:
    """Change nothing: this schema is where every later migration starts."""
