"""The log of several replicas in Apache Kafka: a topic for each stream, and a journal that orders the appends."""
