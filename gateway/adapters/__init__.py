"""Loading and unloading adapters through the API, on all replicas of a model."""
