"""What the proxy before Trino gives to queries, against Trino alone on the same tables."""
