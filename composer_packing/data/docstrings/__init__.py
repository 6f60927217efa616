"""The built-in corpus: docstrings of the installed Python packages. `extract` finds them, `corpus` prepares them."""
