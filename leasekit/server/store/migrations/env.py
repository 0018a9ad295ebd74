"""Alembic runs this for every command; the store hands in the connection that it already has."""

from alembic import context

from leasekit.server.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
context.run_migrations()
