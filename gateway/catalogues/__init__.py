"""Registered items: catalogues of token ids that requests name by id."""
