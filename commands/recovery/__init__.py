"""Commands for an operator who loses or moves a database: backup, restore, migrate and rebuild."""
