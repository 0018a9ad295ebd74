"""Migrations of a store's tables. Opening a store runs the migrations that it lacks."""
