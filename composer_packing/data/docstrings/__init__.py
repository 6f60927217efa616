"""The built-in corpus: docstrings of the installed Python packages, read from their source files."""
