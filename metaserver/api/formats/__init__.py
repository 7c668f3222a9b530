"""Formats of answers: listings as Arrow and JSON, and streamed answers."""
