"""Input topics: any Kafka producer can write to them, and the owner of the table appends their rows to the log."""
