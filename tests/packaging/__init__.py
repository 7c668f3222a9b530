"""Tests of what is installed: the wheel, its extras and what each import needs."""
