"""Random tables, rows and expressions for the planner's tests."""
