"""Operation: health, logins, tokens, grants, audit."""
