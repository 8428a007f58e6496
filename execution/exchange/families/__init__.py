"""Families of models at Hugging Face, a file each: names of their tensors and settings, and what
ours must be set to. A new family is a file and its line in `known.py`.
"""
