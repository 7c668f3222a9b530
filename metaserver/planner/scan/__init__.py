"""A scan: its request, its result and its plan tasks."""
