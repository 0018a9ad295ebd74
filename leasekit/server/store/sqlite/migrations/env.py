"""The environment that Alembic runs for every command, on the store's own connection."""

from alembic import context

from leasekit.server.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,  # SQLite can alter little of a table in place
)
context.run_migrations()
