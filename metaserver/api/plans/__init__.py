"""Routes of scan planning: the Iceberg REST operations, plan tables, plan views and explain."""
