"""Join conditions as dynamic filters: keys of dimension tables."""
