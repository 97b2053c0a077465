"""Pure functions from arguments to what Lightning is told. Nothing is started here, no file is touched."""
