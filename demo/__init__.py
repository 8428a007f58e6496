"""Runnable stories: `pretraining.py` is the training job. Uses public names of `execution`, `data`
and `config`.
"""
