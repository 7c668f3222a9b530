"""What every route shares: one middleware, request parsing, responses, errors, pages."""
