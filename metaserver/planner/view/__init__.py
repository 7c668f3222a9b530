"""The files of one snapshot as columns, and selections of them."""
