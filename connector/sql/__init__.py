"""One SQL entry: a statement in one dialect, planned with indexes and joins, and run by the engine that suits it."""
