"""The driver: perform what the core decides. Effects become calls of a backend, deadlines become sleeps."""
