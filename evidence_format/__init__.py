"""The evidence report's types, and how its bytes are read: shared by both halves, without any judgement."""
