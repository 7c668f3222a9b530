"""The parts that all routes share: middleware, request parsing, responses, errors and pages."""
