"""Tests of Seamark with Iceberg's REST compatibility kit."""
