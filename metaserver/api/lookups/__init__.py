"""Routes of look-ups: files, statistics, rows by key and rows by bitmap."""
