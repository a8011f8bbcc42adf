"""Requests → token ids and constraints; tokens as they come → OpenAI's objects."""
