"""Measurements of the engine, each ending in one evidence report."""
