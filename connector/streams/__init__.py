"""Writes and reads stream tables for clients, and encodes the files of their rows for the server."""
