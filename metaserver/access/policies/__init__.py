"""Policy servers beside the grants: Open Policy Agent and OpenFGA."""
