"""``python -m engine.kernels``: compiles ahead of time the kernels that the shipped pair needs.

On a CPU mlx compiles a fused kernel when it is first used, about half a second each, and keeps it below
TMPDIR for whoever runs with the same TMPDIR. A few tokens of every way of decoding use them all. Nothing is
to be done on Metal, nor where there is no C++ compiler.
"""

import click

from engine.config import Options, open_engine
from engine.decode import decode
from engine.errors import EngineError
from engine.evaluation.arms import plain
from engine.pace import CANDIDATES, Fixed
from engine.runtime import prepare

PROMPT = "class BaseProject:\n"
TOKENS = 40  # enough for a second round of the longest block


def compile_kernels() -> bool:
    """Use every kernel of the shipped pair: plain steps of both loops, and blocks; in float32.

    Returns:
        Whether kernels are compiled on this machine.

    Raises:
        ModelError: the shipped pair cannot be loaded.
    """
    runtime = prepare()
    if runtime.metal or not runtime.compiles:
        return False
    engine = open_engine(Options(dtype="float32"))
    drafter = engine.drafter.drafter if engine.drafter else None
    prompt = engine.target.tokenizer.encode(PROMPT)
    plain(engine.target, prompt, TOKENS, engine.options.prefill_chunk)
    for block in (1, *CANDIDATES):
        for _ in decode(engine.target.target, drafter, prompt, max_tokens=TOKENS, pace=Fixed(block)):
            pass
    return True


def main() -> None:
    """Compile, and say whether there was anything to compile."""
    try:
        compiled = compile_kernels()
    except EngineError as error:
        raise SystemExit(f"engine.kernels: {error}") from None
    click.echo("kernels are compiled" if compiled else "no kernels are compiled on this machine")


if __name__ == "__main__":
    main()
