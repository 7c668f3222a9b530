"""A deterministic simulation of stream tables: the same seed gives the same run."""
