"""The server: models by name over HTTP, each with the KV channels it may be asked for."""
