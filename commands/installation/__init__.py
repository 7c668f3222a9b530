"""Commands that look at this machine: shell completion, and checks of the installation."""
