"""Iceberg's REST compatibility kit against Seamark."""
