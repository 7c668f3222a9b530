"""What operators see of requests: logs, metrics, traces."""
