"""A hundred queries on star schemas: which of them read fewer files, and why the others do not."""
