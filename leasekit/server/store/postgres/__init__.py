"""The store in a PostgreSQL database, which many servers can open at once."""
