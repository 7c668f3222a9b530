"""The storages that Seamark supports: their schemes, and how their locations are parsed and compared."""
