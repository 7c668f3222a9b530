"""Further warehouses of a server: their records, settings and components."""
