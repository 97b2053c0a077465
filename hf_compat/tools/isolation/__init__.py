"""Run a command that sees the user's files and changes none. It uses only the standard library."""
