"""Commands that move tables between catalogs."""
