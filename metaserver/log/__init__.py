"""A streaming log: durable, ordered batches of rows, before they are in data files."""
