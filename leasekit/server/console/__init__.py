"""The web console: pages over an engine, for people; see `site.Console`."""
