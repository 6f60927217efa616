"""The configuration of a run: every key of a YAML file, with its type, its default and its meaning.

`schema` lists the keys of a run and `sources` those of its data. `prepare` lists the settings of
`composer_packing.prepare`, some of which are keys of a source too. `loading` reads a file and `key=value` overrides
into the schema, `durations` resolves what is given as a share of the training, `schedules` makes the packer's
schedules, and `checks` says which values are allowed.
Every mistake is a `ConfigError` of one line.
"""
