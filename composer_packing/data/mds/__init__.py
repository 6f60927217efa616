"""MDS shards on this machine: `shards` checks and maps them, `column` reads one column, `documents` gives documents."""
