"""The engine's thread: loaded models, sessions kept between requests, and requests that take turns."""
