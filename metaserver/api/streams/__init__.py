"""Contains the routes of stream tables."""
