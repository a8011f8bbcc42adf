"""One file an engine, each with what it takes to run it and to replace what its drafter says."""
