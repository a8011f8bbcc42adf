"""One file an engine: how it is opened for a target, and how one generation is run."""
