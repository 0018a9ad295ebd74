"""A fleet of handlers on one keeper."""
