"""Plans with joins."""
