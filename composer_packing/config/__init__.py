"""The configuration of a run: every key of a YAML file, with its type, its default and its meaning.

`schema` holds the keys of a run and `sources` those of its data. `prepare` holds the settings of
`composer_packing.prepare`, some of which are keys of a source too. `limits` declares which values a key may have.
`loading` reads a file and `key=value` overrides into the schema. `durations` turns shares of the training into tokens,
documents or batches. `schedules` makes the schedules of the packer, and `checks` says which values go together. Every
mistake is a `ConfigError` of one line.
"""
