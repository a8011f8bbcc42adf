"""The bus under faults: a seeded run of many requests and kills, and scenarios of single faults."""
