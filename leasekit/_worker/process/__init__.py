"""Handlers in processes of their own, each under a guard that ends it with its lease."""
