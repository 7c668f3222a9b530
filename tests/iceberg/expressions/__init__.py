"""Expressions: JSON, SQL, binding, projections, residuals."""
