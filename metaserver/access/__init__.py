"""Access control: tokens, OIDC, roles on namespaces, and the audit log."""
