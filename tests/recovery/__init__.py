"""Tests of backups, moves, rebuilds and upgrades."""
