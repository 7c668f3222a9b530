"""Tests of the installed package: the wheel, its extras and the imports of each part."""
