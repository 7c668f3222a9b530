"""Routes of operation: health, logins, tokens, grants and audit."""
