"""Sample tables: for each op family, operands and an independent oracle. The generic tests in
test_ops.py read them.
"""
