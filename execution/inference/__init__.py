"""Trained models at work: generation, evaluation, scoring."""
