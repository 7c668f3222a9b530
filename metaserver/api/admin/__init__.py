"""Routes for operators: health, logins, tokens, grants, warehouses, advice and audit."""
