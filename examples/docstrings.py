"""Prints the docstrings of the installed packages as JSON lines: `python examples/docstrings.py > texts.jsonl`."""

import json

from composer_packing.data.docstrings.extract import documents, source_files

if __name__ == "__main__":
    for text in documents(path for _, path in source_files()):
        if text.strip():
            print(json.dumps({"text": text}))
