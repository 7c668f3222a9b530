"""Filter expressions: their forms, binding, projection and evaluation."""
