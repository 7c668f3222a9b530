"""The algebra of query blocks: which rows of a table can change the result of a statement. It knows no syntax."""
