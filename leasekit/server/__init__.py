"""The companion server: task store, store consumer, HSC."""
