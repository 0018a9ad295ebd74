"""The common part of SQL stores, through SQLAlchemy Core: for each subject its statements, and what runs them."""
