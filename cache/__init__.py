"""Cache tiers over immutable keys. Independent of tables and of the other packages."""
