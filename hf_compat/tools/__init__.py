"""What helps somebody move: it reads the core, and the core never reads it."""
