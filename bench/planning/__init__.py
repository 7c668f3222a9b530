"""Scan planning, measured on generated tables against PyIceberg and Iceberg's Java planner. One script a question."""
