"""Cache tiers over immutable keys, independent of tables and of the other packages."""

if __name__ != "seamark.cache":
    raise ImportError("The package is named seamark.cache, not cache; import seamark.cache")
