"""Durable files: written whole, locked, read plain and bounded. The only place that renames, locks
or syncs.
"""
