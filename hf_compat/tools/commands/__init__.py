"""The commands that read scripts and runs, each in the module of its name."""
