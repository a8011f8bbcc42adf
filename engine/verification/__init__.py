"""Replay of an evidence report, behind ``kakeya_engine verify``: the models run over what its rows claim."""
