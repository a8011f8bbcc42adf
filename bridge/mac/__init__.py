"""Set a Mac up as a runner, and take it down again: ``scripts/setup_mac.sh``, ``kakeya_mac runner setup``.

It runs before anything is installed, so it may import only the standard library and `bridge.errors`, `proc`,
`folders`, `weights` and `interpreter`.
"""
