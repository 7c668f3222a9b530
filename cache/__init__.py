"""Cache tiers over immutable keys, independent of tables and of the other packages."""

if __name__ != "seamark.cache":
    raise ImportError("Import seamark.cache: cache is its folder in the repository")
