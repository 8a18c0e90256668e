"""The tests mirror the folders; `from tests.checkpoints import make_checkpoint` and the like for what they share."""
