"""The database of the desired state: SQLite, or PostgreSQL in a cluster."""
