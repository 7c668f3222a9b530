"""Client certificates as logins."""
