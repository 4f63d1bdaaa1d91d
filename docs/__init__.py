"""Pages of the site; `docs.scripts` writes the generated ones."""
