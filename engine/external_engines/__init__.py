"""Other engines' decoding loops on our targets, with the caches of a KV policy in them."""
