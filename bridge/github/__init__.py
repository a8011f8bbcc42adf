"""GitHub Actions as the second way to carry requests, and the REST API, which is optional."""
