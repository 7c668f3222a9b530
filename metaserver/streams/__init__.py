"""Stream tables, whose rows are durable in the log, and visible to readers, before a commit adds them to the table."""
