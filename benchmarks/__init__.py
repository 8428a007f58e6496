"""Speed, against peers, in one run. Every script runs with no arguments and ends with its figures
as one JSON line.
"""
