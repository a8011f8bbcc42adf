"""Restoration: keys and values of evicted prompt positions are supplied from another source.

`sites` knows how the layers of each family make their keys and values, `capture` listens to them, `sources`
says where rows come from, `session` puts them into the caches of one sequence, and `loading` opens what a
``--kv restored:…`` text asks for.

The rows are stored as any others are, so restoring saves no memory here. It would where rows are computed
anew at every read, and evicted ones are dropped.
"""
