"""Attacks on a running server: a hostile tenant beside another whose names, values and bytes it must never get."""
