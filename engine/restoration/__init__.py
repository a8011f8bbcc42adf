"""Restoration: keys and values of evicted prompt positions are supplied from another source.

The rows are stored as any others are, so restoring saves no memory here. It would where rows are computed
again at every read, and evicted ones are dropped.
"""
