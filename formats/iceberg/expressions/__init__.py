"""Filter expressions: their JSON and SQL forms, binding, projection and evaluation."""
