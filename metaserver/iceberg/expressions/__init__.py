"""Expressions: their forms, binding, projection, evaluation."""
