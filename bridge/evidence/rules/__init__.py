"""Every rule of the gate: a code, when it rejects, what to do, and one pure function that finds it broken."""

from bridge.evidence.rules.registry import ELSEWHERE, RULES, Explanation, Rule, explain, rules_table

__all__ = ["ELSEWHERE", "RULES", "Explanation", "Rule", "explain", "rules_table"]
