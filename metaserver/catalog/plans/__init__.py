"""Plans as tables and views."""
