"""The training run: its loop, its data, and what it leaves in its folder."""
