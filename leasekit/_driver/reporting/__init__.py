"""Report how tasks ended: encode results, send them until they are answered, keep them on disk meanwhile."""
