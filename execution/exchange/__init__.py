"""Weights to and from Hugging Face, and those that a run begins with."""
