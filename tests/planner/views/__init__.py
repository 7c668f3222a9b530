"""Tests of views over blocks: sharing, and damage."""
