"""Corpus, training and evaluation of the demo models in engine/demo/models: ``python -m examples.demo_models.train``."""
