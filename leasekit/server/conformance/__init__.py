"""Conformance: check a client of the protocol, in any language, against a server that records and disturbs it.

`record` holds what the client did, `rules` judge a record, `scenarios` say what is disturbed, `recorder` is the server,
and `runner` runs a client's program through the scenarios.
"""
