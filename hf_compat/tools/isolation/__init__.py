"""A command that sees the user's files and changes none: what the system offers, tried. The standard library only."""
