"""The peers benchmark: our engine and four others on the same weights, in one process, arms interleaved.

Importing it loads a fast BLAS, which must happen before anything imports mlx.
"""

import engine  # noqa: F401 - before mlx
