"""The streaming log, which stores rows as durable, ordered batches until a flush adds them to data files."""
