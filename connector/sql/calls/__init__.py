"""Translates groups of functions of the dialect: numbers, texts, times, nested values and windows."""
