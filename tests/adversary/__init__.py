"""The adversary suite: hostile inputs as data, by family, and the doors they are pushed through.

The tables (`requests`, `workloads`, …) hold inputs and what must come of each; they do nothing. The tests
beside them open the doors. `families` lists all tables, for the page docs/adversary.md.
"""
