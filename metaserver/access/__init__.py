"""Who may do what: tokens, OIDC, roles scoped to namespaces, the audit log."""
