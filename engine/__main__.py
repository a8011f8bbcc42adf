"""``python -m engine``: the same as ``kakeya_engine``."""

from engine.cli import main

if __name__ == "__main__":
    main()
