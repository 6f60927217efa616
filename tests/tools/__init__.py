"""What several test modules share, and the programs that they run as processes of their own."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
