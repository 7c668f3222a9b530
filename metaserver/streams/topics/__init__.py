"""Input topics: any Kafka producer writes to them, and the owner of the table appends their rows to the log."""
