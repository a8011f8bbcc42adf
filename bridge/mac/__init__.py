"""Sets a Mac up as a runner, and takes it down again."""
