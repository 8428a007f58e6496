"""Speed and memory beside others, in one run, and what our own parts cost (`own.py`). Every script
runs with no arguments and ends with its figures as one line of JSON.
"""
