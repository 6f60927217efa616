"""Training: everything that Composer is given.

`run` builds the parts of a run and fits. `batches` and `evaluation` make packed batches of documents, `dataspec` wraps
them for Composer, `composer_model` wraps the encoder, and `optimizer` sets the learning rate. `monitor` logs what a
batch held, `console` and `report` print.
"""
