"""Keys: the common form of values in all indexes."""
