"""What a run needs before it starts: memory, traffic, time, and how it is best executed."""
