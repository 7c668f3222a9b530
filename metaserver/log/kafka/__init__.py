"""The log of a fleet in Apache Kafka: a topic for each stream, and a journal that orders the appends."""
