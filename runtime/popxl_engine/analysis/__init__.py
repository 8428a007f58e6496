"""What is known of a block: who makes and uses its values, what shares storage, what holds the same
number, what it does beyond its results. `Block.find` runs each analysis once.
"""
