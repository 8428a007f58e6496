"""The speed of the training program on synthetic data."""
