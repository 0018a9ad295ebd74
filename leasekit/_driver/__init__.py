"""Impure and small: turns effects into awaits and deadlines into sleeps."""
