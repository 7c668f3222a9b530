"""Copies of the whole database: backups, restores, and moves to another database."""
