"""Tests of imports from other catalogs, exports to them, and federated warehouses."""
