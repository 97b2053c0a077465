"""The commands that read scripts and runs: one module each, named as the command."""
