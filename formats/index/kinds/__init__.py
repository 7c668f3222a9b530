"""The index kinds: how each is built, encoded, merged and queried."""
