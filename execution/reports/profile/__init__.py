"""`--profile`: where the time of a run went, beside the machine's limits."""
