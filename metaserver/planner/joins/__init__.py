"""Join conditions as dynamic filters: the keys of dimension tables."""
