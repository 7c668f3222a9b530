"""Emulators of cloud storages."""
