"""Tables, rows and expressions that the planner's tests draw."""
