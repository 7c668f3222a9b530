"""A scan as JSON."""
