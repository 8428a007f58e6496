"""Memory, remote rows, replicas, streams. May import torch and the nouns of popxl; knows no graphs
and no ops.
"""
