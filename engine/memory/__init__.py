"""How much memory a run takes, said beforehand: a published formula, and the caches' own code on shapes."""
