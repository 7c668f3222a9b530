"""Cache tiers over immutable keys. Knows nothing of tables and imports nothing of ours."""
