"""The storages that Seamark knows: their schemes, and how their locations are parsed and compared."""
