"""Speed and memory beside others, in one run, and what our own parts cost (`own.py`). Every script
but `trees.py`, which wants a checkout, runs with no arguments; what then lacks a file says so. Each
ends with its figures as one line of JSON.
"""
