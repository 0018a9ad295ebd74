"""Explain why a lease was lost: what was recorded, and what held the process up."""
