"""The database's schema, step by step; alembic runs what is missing whenever the server starts."""
