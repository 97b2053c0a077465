"""What a checkpoint holds, how it is written so that a kill loses nothing, and how it is read without running code."""
