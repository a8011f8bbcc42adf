"""The adversary suite: hostile inputs as data, by family, and the readers they are given to.

The tables (`requests`, `workloads`, …) hold inputs and what must come of each; they do nothing. The tests
in this folder call the readers. `families` lists all tables, for the page docs/adversary.md.
"""
