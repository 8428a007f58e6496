"""GPT pretraining by phased execution: the one import name of the application.

Its packages are links to the repository's folders, so a checkout and an installed wheel import the
same names, and the folders take no top-level names.
"""

__version__ = "0.3.0"
