"""The timeline: a log of instants. Clients read, watch and archive it. Webhooks, Kafka and NATS receive its events."""
