"""A speculative-decoding engine on MLX: a prompt's way to text.

Importing the package loads a fast BLAS where the system has one, because that must happen before the first
import of mlx. It imports neither mlx nor anything else that is slow.
"""

from contextlib import suppress

from engine.device import load_fast_blas
from engine.errors import ConfigurationError

with suppress(ConfigurationError):  # a bad switch is reported by `engine.device.prepare`, with a message
    load_fast_blas()
