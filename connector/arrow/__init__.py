"""Rows as Arrow data: cast to a table's types, filtered, partitioned and ordered."""
