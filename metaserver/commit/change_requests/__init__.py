"""Changes in the form in which writers send them, and the error for refused changes."""
