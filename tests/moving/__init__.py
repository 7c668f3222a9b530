"""Tests of imports from other catalogs, exports to other catalogs, and federated warehouses."""
