"""A request's way to a Mac and back, over git. Imports no mlx, and never the engine."""

__version__ = "0.1.0"
