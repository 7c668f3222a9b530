"""Routes of lookups: files, statistics, rows by key, and rows by bitmap."""
