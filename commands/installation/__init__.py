"""Commands for this machine: shell completion, and checks of the installation."""
