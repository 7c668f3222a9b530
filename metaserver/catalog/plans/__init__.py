"""Plans that engines read as tables and views."""
