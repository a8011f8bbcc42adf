"""The server under load: many clients, some of which vanish, and every answer as if it were alone."""
