"""The roles of the server, under the names of Dropbox's ATF, as functions of a unit of work and a batch."""
