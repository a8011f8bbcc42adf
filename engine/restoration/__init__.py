"""Keys and values of evicted prompt positions from another source. They are stored, so no memory is saved."""
