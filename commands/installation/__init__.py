"""Commands that are about this machine: shell completion, and checks of the installation."""
