"""The migrations, one file each; a released migration must not change."""
