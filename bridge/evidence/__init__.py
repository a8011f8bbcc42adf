"""Whether a number may be shown as evidence: the report format, the gate and its rules, redaction."""
