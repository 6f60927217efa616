"""Where documents come from: finding them, tokenizing them once, and reading them."""
