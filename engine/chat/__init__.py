"""Conversations with a model of the registry, in this process."""
