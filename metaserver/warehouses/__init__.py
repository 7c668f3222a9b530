"""Further warehouses: their records, the settings of each, and the components that serve them."""
