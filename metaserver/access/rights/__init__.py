"""The model of rights: privileges, roles, objects, and the decision."""
