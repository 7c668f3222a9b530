"""Emulators of the storages of clouds."""
