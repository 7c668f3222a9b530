"""Commands for operators who have lost a database or want to move it: backup, restore, migrate and rebuild."""
