"""The algebra of query blocks decides which rows of a table can change the result of a statement.

It knows no SQL syntax.
"""
