"""Federated warehouses: they show the tables of another Iceberg REST catalog, and are read-only."""
