"""Inputs that no client should send, by the routes that refuse them (`tests/api/bad_inputs.py`)."""
