"""Sets a Mac up as a runner, and takes it down again: ``scripts/setup_mac.sh``, ``kakeya_mac runner setup``.

It runs before anything is installed, so it needs the standard library, `bridge.errors`, `bridge.proc`,
`bridge.settings`, `bridge.weights` and `bridge.interpreter` alone. Every step says what it would do as a list
of actions; a dry run prints that very list.
"""
