"""Keys: the form that values have in all indexes."""
