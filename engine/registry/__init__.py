"""The registry: models by name, where their parts come from, and the KV channels each may be asked for."""
