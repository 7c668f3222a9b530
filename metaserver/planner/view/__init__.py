"""The data files of one snapshot in columns, and selections of them."""
