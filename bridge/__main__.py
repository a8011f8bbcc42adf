"""``python -I -m bridge``: the command ``kakeya_mac`` by its module, as runners start it."""

from bridge.cli import main

main()
