"""The companion server: frontend, heartbeat and status controller (HSC), store consumer, and the task store."""
