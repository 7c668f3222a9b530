"""Plans with indexes."""
