"""Tests of expressions: JSON, SQL, binding, projections and residuals."""
