"""The steps, each a file that is never changed once it was released."""
