"""Tests of backups, moves to another database, rebuilds and upgrades."""
